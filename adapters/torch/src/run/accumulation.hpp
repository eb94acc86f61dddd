// SPDX-License-Identifier: Apache-2.0
/// @file
/// Gradients that are there already. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

namespace remat::pytorch {

/// Autograd would do nothing with a gradient of `parameter` but to add it to `.grad`: nobody is to be told.
inline bool only_adds(const at::Tensor& parameter) {
  const auto& grad = parameter.grad();
  if (!grad.defined() || grad.requires_grad() || grad.layout() != c10::kStrided ||
      grad.scalar_type() != parameter.scalar_type() || grad.sizes() != parameter.sizes() || grad.device() != parameter.device() ||
      !grad.is_non_overlapping_and_dense() || grad.is_conj() || grad.is_neg() || grad.is_inference())
    return false;
  const auto* meta = ::torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || !meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr) return false;
  const auto node = ::torch::autograd::impl::try_get_grad_accumulator(parameter);
  return !node || (node->pre_hooks().empty() && node->post_hooks().empty());
}
inline bool all_only_add(const std::vector<at::Tensor>& parameters) {
  return !parameters.empty() && std::all_of(parameters.begin(), parameters.end(), only_adds);
}

}  // namespace remat::pytorch
