// SPDX-License-Identifier: Apache-2.0
/// @file
/// Keeps the inputs of a forward as they were before it. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace remat::pytorch::detail {

/// Per input, a tensor over the same memory, with the same version counter and the history from before the forward. The forward
/// may change the history of the input by writing to it. A tensor that collects a gradient is its own origin.
std::vector<at::Tensor> origins_of(const std::vector<at::Tensor>& inputs);

/// True if the forward has given this input, or a tensor over it, another history than the origin has.
bool has_new_history(const at::Tensor& input, const at::Tensor& origin);

/// True if the gradient of an output bypasses the forward: the output collects gradients itself, or is an unchanged input.
bool keeps_history(const at::Tensor& output, const std::vector<at::Tensor>& origins);

}  // namespace remat::pytorch::detail
