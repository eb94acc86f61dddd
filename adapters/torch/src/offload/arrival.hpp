// SPDX-License-Identifier: Apache-2.0
/// @file
/// Who is told that a gradient has been accumulated. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace remat::pytorch {

/// Does something with complete gradients.
class gradient_taker {
 public:
  virtual ~gradient_taker() = default;
  /// @param p has a gradient
  virtual void arrived(const at::Tensor& p) = 0;
};

/// Steps parameters within the backward.
class early_stepper : public gradient_taker {
 public:
  /// Is a gradient used and freed as soon as it is there?
  virtual bool at_once() const = 0;
};

/// The hook of a parameter, behind those that it had: its gradient is moved, unless it is used at once, and then used.
struct arrival final : ::torch::autograd::PostAccumulateGradHook {
  explicit arrival(std::unique_ptr<::torch::autograd::PostAccumulateGradHook> b) : before(std::move(b)) {}

  void operator()(const at::Tensor& p) override {
    if (before) (*before)(p);
    const auto mover = moves.lock();
    const auto stepper = steps.lock();
    if (mover && !(stepper && stepper->at_once())) mover->arrived(p);
    if (stepper) stepper->arrived(p);
  }

  /// That of `p`, or none.
  static arrival* find(const at::Tensor& p) {
    return dynamic_cast<arrival*>(::torch::autograd::impl::post_acc_grad_hooks(p).get());
  }
  /// That of `p`, which has one from now on.
  static arrival& of(const at::Tensor& p) {
    if (auto* const found = find(p)) return *found;
    auto& hook = ::torch::autograd::impl::post_acc_grad_hooks(p);
    auto made = std::make_unique<arrival>(std::move(hook));
    auto& result = *made;
    hook = std::move(made);
    return result;
  }
  /// Removes it if nobody is there to be told.
  static void tidy(const at::Tensor& p) {
    auto* const found = find(p);
    if (found == nullptr || !found->moves.expired() || !found->steps.expired()) return;
    auto rest = std::move(found->before);
    ::torch::autograd::impl::post_acc_grad_hooks(p) = std::move(rest);
  }

  std::unique_ptr<::torch::autograd::PostAccumulateGradHook> before;
  std::weak_ptr<gradient_taker> moves;
  std::weak_ptr<early_stepper> steps;
};

}  // namespace remat::pytorch
