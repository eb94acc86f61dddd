// SPDX-License-Identifier: Apache-2.0
#include "origins.hpp"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "hollow.hpp"

namespace remat::pytorch::detail {

std::vector<at::Tensor> origins_of(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> origins;
  for (const auto& t : inputs) {
    origins.push_back(t);
    if (!t.defined() || !t.has_storage() || t.is_inference() || !::torch::autograd::isDifferentiableType(t.scalar_type()) ||
        collects_gradient(t))
      continue;
    auto& origin = origins.back() = twin_of(t);
    if (t.requires_grad()) ::torch::autograd::impl::set_gradient_edge(origin, ::torch::autograd::impl::gradient_edge(t));
  }
  return origins;
}

bool has_new_history(const at::Tensor& input, const at::Tensor& origin) {
  if (!input.defined() || !input.requires_grad()) return false;
  return !origin.requires_grad() ||
         !(::torch::autograd::impl::gradient_edge(input) == ::torch::autograd::impl::gradient_edge(origin));
}

bool keeps_history(const at::Tensor& output, const std::vector<at::Tensor>& origins) {
  if (!output.requires_grad()) return false;
  return collects_gradient(output) || std::any_of(origins.begin(), origins.end(), [&](const auto& o) {
           return o.defined() && o.requires_grad() && !has_new_history(output, o);
         });
}

}  // namespace remat::pytorch::detail
