// SPDX-License-Identifier: Apache-2.0
/// @file
/// Helpers for the tests of wrapped modules.
#pragma once

#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>

#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"

namespace wrap_tests {

using namespace remat;
namespace rt = remat::pytorch;

inline void check_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("tensor " << i);
    CHECK(same_bits(a[i], b[i]));
  }
}

inline std::vector<at::Tensor> grads(const ::torch::nn::Module& m) {
  std::vector<at::Tensor> list;
  for (const auto& p : m.parameters()) list.push_back(p.grad());
  return list;
}

/// A model twice, with equal parameters.
struct twins {
  models::sample plain, planned;
  explicit twins(std::size_t which) {
    ::torch::manual_seed(17);
    plain = models::all().at(which);
    ::torch::manual_seed(17);
    planned = models::all().at(which);
  }
};

inline void copy_buffers(::torch::nn::Module& to, const ::torch::nn::Module& from) {
  at::NoGradGuard no_grad;
  for (const auto& b : from.named_buffers()) to.named_buffers()[b.key()].copy_(b.value());
}

inline void sgd(::torch::nn::Module& m) {
  at::NoGradGuard no_grad;
  for (auto& p : m.parameters())
    if (p.grad().defined()) p.add_(p.grad(), -0.05);
}

}  // namespace wrap_tests
