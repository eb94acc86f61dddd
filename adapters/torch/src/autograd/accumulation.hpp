// SPDX-License-Identifier: Apache-2.0
/// @file
/// Adds to existing gradients, and calls the hooks of complete ones. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <remat/pytorch/program.hpp>

#include "../base/hooks.hpp"
#include "finished_edges.hpp"

namespace remat::pytorch {

/// True if autograd calls no hook with a gradient of `parameter`.
inline bool has_no_hooks(const at::Tensor& parameter) {
  const auto* meta = ::torch::autograd::impl::get_autograd_meta(parameter);
  if (meta == nullptr || !meta->hooks_.empty() || meta->post_acc_grad_hooks_ != nullptr) return false;
  const auto node = ::torch::autograd::impl::try_get_grad_accumulator(parameter);
  return !node || (node->pre_hooks().empty() && node->post_hooks().empty());
}
/// True if autograd would only add a gradient of `parameter` to `.grad`, and call no hook.
inline bool only_adds(const at::Tensor& parameter) {
  const auto& grad = gradient_of(parameter);
  if (!grad.defined() || !parameter.requires_grad() || grad.requires_grad() || grad.layout() != c10::kStrided ||
      grad.scalar_type() != parameter.scalar_type() || grad.sizes() != parameter.sizes() || grad.device() != parameter.device() ||
      !grad.is_non_overlapping_and_dense() || grad.is_conj() || grad.is_neg() || grad.is_inference())
    return false;
  return has_no_hooks(parameter);
}
inline bool all_only_add(const std::vector<at::Tensor>& parameters) {
  return !parameters.empty() && std::all_of(parameters.begin(), parameters.end(), only_adds);
}

/// True if the program adds to the existing gradient of its parameter i itself (`accumulating`), and does not leave that to
/// autograd.
inline bool adds_itself(const program& step, std::size_t i) {
  return step.from(step.views[step.parameter_grads[i]].value) == role::gradient;
}

/// True if a hook is called once a gradient of `parameter` has been accumulated.
inline bool has_post_hook(const at::Tensor& parameter) {
  const auto* meta = ::torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && meta->post_acc_grad_hooks_ != nullptr;
}
/// True if the gradient is large enough to be given to a hook early.
inline bool is_large(const at::Tensor& parameter) { return static_cast<bytes_t>(parameter.nbytes()) >= min_early_gradient_bytes; }
/// True if all large parameters have such hooks, and the next graph that leads to any of them will be the only one.
/// @tparam F returns, for the accumulator of a parameter, the number of edges that lead to it now and do not count
template <class F>
bool may_be_given(const std::vector<at::Tensor>& parameters, F own) {
  return std::all_of(parameters.begin(), parameters.end(), [&](const auto& p) {
    if (!is_large(p)) return true;
    const auto node = ::torch::autograd::impl::try_get_grad_accumulator(p);
    return has_post_hook(p) && (!node || finished_edges::live_references(node) <= 1 + own(node.get()));
  });
}

/// Does with a complete gradient what the engine would do at the end of the backward.
/// @param accumulator accumulator of the parameter
inline void accumulate(::torch::autograd::Node& accumulator, at::Tensor&& gradient) {
  ::torch::autograd::variable_list list;
  list.push_back(std::move(gradient));
  for (const auto& hook : accumulator.tensor_pre_hooks()) list = (*hook)(list);
  for (const auto& hook : accumulator.pre_hooks()) list = (*hook)(list);
  if (accumulator.post_hooks().empty()) {
    accumulator(std::move(list));
    return;
  }
  auto outputs = accumulator(::torch::autograd::variable_list(list));
  for (const auto& hook : accumulator.post_hooks()) outputs = (*hook)(outputs, list);
}

}  // namespace remat::pytorch
