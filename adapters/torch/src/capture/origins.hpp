// SPDX-License-Identifier: Apache-2.0
/// @file
/// Inputs of a forward as they were before it. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace remat::pytorch::detail {

/// Per input a tensor of the same memory and version counter that keeps its history. The forward may give the input another one:
/// it may write to it. A tensor that collects a gradient is its own origin.
std::vector<at::Tensor> origins_of(const std::vector<at::Tensor>& inputs);

/// The forward has given this input, or a tensor over it, another history than its origin has.
bool has_new_history(const at::Tensor& input, const at::Tensor& origin);

/// Its gradient does not pass through the forward that returns it: it collects gradients itself, or it is an input as it was.
bool keeps_history(const at::Tensor& output, const std::vector<at::Tensor>& origins);

}  // namespace remat::pytorch::detail
