// SPDX-License-Identifier: Apache-2.0
/// @file
/// From a module as it is to a program: the training step is run once, without its memory, and recorded below autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/torch/program.hpp>

namespace remat::torch {

/// The module cannot be captured; `what()` names the operator, its place among the calls, and the reason.
struct cannot_capture : error {
  using error::error;
};

/// Forward of a module: tensors to tensors. It takes its inputs from the argument and closes over the module only.
using forward_function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// What the loss makes of an output.
struct output_use {
  bool used = true;                   ///< it gives it a gradient
  std::vector<int64_t> strides = {};  ///< of that gradient; empty: those of the output
  bool operator==(const output_use&) const = default;
};

/// Records one training step (forward, gradient of the outputs with respect to parameters and inputs) as a program.
///
/// Every ATen call below autograd is recorded while it runs on the real device on *hollow* tensors: storages of the true size
/// that own memory only while an operator touches them. The peak memory of a capture is that of the largest single operator.
/// The recorded calls are then turned into storage versions: a view is no call, an in-place write makes a new version or
/// becomes part of the node that made the old one.
///
/// Nothing is left changed: parameters, buffers, inputs, `.grad` and the state of the generator are as before, also if an
/// exception is thrown. One capture runs at a time in a process; a second thread waits.
///
/// @param forward    the module; run once, with grad mode on
/// @param inputs     its arguments: sizes, strides, types and `requires_grad` count; values only of small integer tensors, as
///                   a hint to kernels that index with them
/// @param parameters of the module; frozen ones (no `requires_grad`) are treated as buffers
/// @param buffers    of the module
/// @param names      of the parameters, then of the buffers; may be shorter
/// @param uses       of the outputs, each tensor once; may be shorter
/// @return the program; valid for inputs of the same sizes, strides and types
/// @throws cannot_capture if an output of an operator depends on values of activations (`item`, `nonzero`, boolean indexing),
///         no output needs a gradient, a tensor is sparse, quantized or nested, tensors live on several devices, a dispatch
///         mode is active, a module resizes storages or returns a tensor no recorded operator made
/// @throws not_available if this build of PyTorch, or another library, has taken the dispatch key the recorder needs
/// Complexity: one training step; O(calls + views) bookkeeping.
///
/// @code
/// auto step = remat::torch::capture([&](const auto& in) { return std::vector<at::Tensor>{net->forward(in[0])}; }, {x},
///                                   net->parameters(), net->buffers());
/// std::cout << remat::torch::explain(step);
/// @endcode
program capture(const forward_function& forward, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
                const std::vector<at::Tensor>& buffers = {}, const std::vector<std::string>& names = {},
                const std::vector<output_use>& uses = {});

}  // namespace remat::torch
