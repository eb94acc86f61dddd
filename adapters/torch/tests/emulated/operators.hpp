// SPDX-License-Identifier: Apache-2.0
/// @file
/// Facts about operators that their schemas do not state, and their execution on the host.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "kernels.hpp"

namespace emulated {

struct traits {
  bool view = false;       ///< results share memory with arguments, and no byte is touched
  bool untouched = false;  ///< no byte is touched, as by `empty`
  bool allocates = false;  ///< like `untouched`, but returns new memory
  bool product = false;    ///< of matrices, so alignment matters
  bool workspace = false;  ///< the first such call of a thread allocates a workspace
  bool draws = false;
  bool dropout = false;      ///< the kernel of the host takes no generator
  bool counts = false;       ///< the kernel of the host takes no integers
  bool looks = false;        ///< the host needs the result or its size
  bool indexes = false;      ///< looks at data if an index is a mask
  bool mixes = false;        ///< tensors of the host may be among the arguments
  int generator = -1;        ///< index of the generator argument
  int training = -1;         ///< index of the argument that tells whether `silent` arguments are written
  std::vector<bool> writes;  ///< for each argument: the schema marks it as written
  std::vector<int> silent;   ///< arguments that are written without a mark in the schema
};

const traits& traits_of(const c10::OperatorHandle& op);

/// The arguments that this call writes.
std::vector<bool> written_by(const traits& t, const torch::jit::Stack& arguments);
/// Whether this call needs data on the host.
bool looks_at_data(const traits& t, const torch::jit::Stack& arguments);

/// The defined and undefined tensors in a value, lists included.
std::vector<at::Tensor> tensors_in(const c10::IValue& v);

/// Runs the kernel of the host. Results replace the arguments on the stack. @param from state from which the kernel draws
void run_on_host(const c10::OperatorHandle& op, const traits& t, torch::jit::Stack& stack, const philox* from);

}  // namespace emulated
