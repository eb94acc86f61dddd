// SPDX-License-Identifier: Apache-2.0
/// @file
/// Hooks that receive accumulated gradients. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace remat::pytorch {

/// Receiver of complete gradients.
class gradient_taker {
 public:
  virtual ~gradient_taker() = default;
  /// @param p parameter whose gradient is complete
  virtual void arrived(const at::Tensor& p) = 0;
};

/// Steps parameters within the backward.
class early_stepper : public gradient_taker {
 public:
  /// True if each gradient is used and freed as soon as it arrives.
  virtual bool at_once() const = 0;
};

/// The hook of a parameter, called after the hooks that it had. First it moves the gradient, unless the gradient is used at once.
/// Then it steps the parameter.
struct arrival final : ::torch::autograd::PostAccumulateGradHook {
  explicit arrival(std::unique_ptr<::torch::autograd::PostAccumulateGradHook> b) : before(std::move(b)) {}

  void operator()(const at::Tensor& p) override {
    if (before) (*before)(p);
    const auto mover = moves.lock();
    const auto stepper = steps.lock();
    if (mover && !(stepper && stepper->at_once())) mover->arrived(p);
    if (stepper) stepper->arrived(p);
  }

  /// The hook of `p`, or null.
  static arrival* find(const at::Tensor& p) {
    return dynamic_cast<arrival*>(::torch::autograd::impl::post_acc_grad_hooks(p).get());
  }
  /// The hook of `p`, made if missing.
  static arrival& of(const at::Tensor& p) {
    if (auto* const found = find(p)) return *found;
    auto& hook = ::torch::autograd::impl::post_acc_grad_hooks(p);
    auto made = std::make_unique<arrival>(std::move(hook));
    auto& result = *made;
    hook = std::move(made);
    return result;
  }
  /// Removes the hook if it has no receiver left.
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
