// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the kernels know of an operator beyond its schema, and how it runs on the host.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

#include "kernels.hpp"

namespace emulated {

struct traits {
  bool view = false;       ///< results share memory with arguments, and no byte is touched
  bool untouched = false;  ///< no byte is touched, as by `empty`
  bool allocates = false;  ///< of these: new memory
  bool product = false;    ///< of matrices, so alignment matters
  bool workspace = false;  ///< the first one of a thread takes a workspace
  bool draws = false;
  bool dropout = false;      ///< the host's kernel takes no generator
  bool counts = false;       ///< the host's kernel takes no integers
  bool looks = false;        ///< the host needs the result, or its size
  bool indexes = false;      ///< looks at data if an index is a mask
  bool mixes = false;        ///< tensors of the host may be among the arguments
  int generator = -1;        ///< which argument
  int training = -1;         ///< which argument tells that `silent` are written
  std::vector<bool> writes;  ///< for each argument: the schema says that it is written
  std::vector<int> silent;   ///< arguments that are written though the schema does not say so
};

const traits& traits_of(const c10::OperatorHandle& op);

/// The arguments that are written by this call.
std::vector<bool> written_by(const traits& t, const torch::jit::Stack& arguments);
/// Whether this call needs data on the host.
bool looks_at_data(const traits& t, const torch::jit::Stack& arguments);

/// The defined and undefined tensors in a value, lists included.
std::vector<at::Tensor> tensors_in(const c10::IValue& v);

/// Runs the kernel of the host. Arguments become results. `from`: where it draws.
void run_on_host(const c10::OperatorHandle& op, const traits& t, torch::jit::Stack& stack, const philox* from);

}  // namespace emulated
