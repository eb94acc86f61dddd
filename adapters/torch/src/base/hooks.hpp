// SPDX-License-Identifier: Apache-2.0
/// @file
/// Access to gradients: locks, and backwards without hooks. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace remat::pytorch {

/// `t.grad()`, without its warning for tensors that are not leaves.
inline const at::Tensor& gradient_of(const at::Tensor& t) { return t.unsafeGetTensorImpl()->grad(); }

/// While it lives, no other thread runs Python code (`when_gradients_move`).
class python_lock {
 public:
  python_lock();
  ~python_lock();
  python_lock(const python_lock&) = delete;
  python_lock& operator=(const python_lock&) = delete;

 private:
  std::optional<int> state_;  ///< nothing: no Python
};

/// While it lives, no backward adds to the gradient of a parameter. Hooks on gradients are called outside of this lock.
class accumulation_lock {
 public:
  explicit accumulation_lock(const at::Tensor& parameter)
      : accumulator_(::torch::autograd::impl::try_get_grad_accumulator(parameter)) {
    if (accumulator_) lock_ = std::unique_lock(as_node::mutex_of(*accumulator_));
  }
  accumulation_lock(const at::Tensor& parameter, std::try_to_lock_t now)
      : accumulator_(::torch::autograd::impl::try_get_grad_accumulator(parameter)) {
    if (accumulator_) lock_ = std::unique_lock(as_node::mutex_of(*accumulator_), now);
  }
  /// @param accumulator must outlive this lock
  explicit accumulation_lock(::torch::autograd::Node& accumulator) : lock_(as_node::mutex_of(accumulator)) {}

  /// True if a backward is adding to the gradient.
  bool failed() const { return accumulator_ && !lock_; }

 private:
  struct as_node : ::torch::autograd::Node {
    static std::mutex& mutex_of(Node& n) { return n.*(&as_node::mutex_); }
  };
  c10::intrusive_ptr<::torch::autograd::Node> accumulator_;
  std::unique_lock<std::mutex> lock_;
};

/// Counts the backwards of planned steps, on all threads, until their gradients have been accumulated.
class planned_backwards {
 public:
  /// Call this within a backward, which counts from now on.
  static void begin() {
    ++begun();
    ++running();
    ::torch::autograd::Engine::get_default_engine().queue_callback(
        [ended = std::shared_ptr<void>(nullptr, [](void*) { --running(); })] {});
  }
  /// True if such a backward has run since this object was made.
  bool seen() const { return any_ || begun() != before_; }

 private:
  static std::atomic<std::size_t>& begun() {
    static std::atomic<std::size_t> n = 0;
    return n;
  }
  static std::atomic<std::size_t>& running() {
    static std::atomic<std::size_t> n = 0;
    return n;
  }

  std::size_t before_ = begun();
  bool any_ = running() > 0;
};

/// While it lives, tensors have no hooks: hooks must not see the gradients of a capture's backward.
class without_hooks {
 public:
  explicit without_hooks(const std::vector<at::Tensor>& tensors) {
    for (const auto& t : tensors) {
      auto* meta = ::torch::autograd::impl::get_autograd_meta(t);
      if (meta == nullptr) continue;
      hidden_.emplace_back(meta, std::exchange(meta->hooks_, {}));
      const auto& maker = t.grad_fn();
      if (!maker) continue;
      auto& [pre_hooks, kept] = of_nodes_[maker];
      if (auto& now = maker->tensor_pre_hooks(); !now.empty()) pre_hooks = std::exchange(now, {});
      if (auto& now = maker->retains_grad_hooks(); !now.empty()) kept = std::exchange(now, {});
    }
  }
  ~without_hooks() {
    for (auto& [meta, hooks] : hidden_) meta->hooks_ = std::move(hooks);
    for (auto& [node, hooks] : of_nodes_) {
      node->tensor_pre_hooks() = std::move(hooks.first);
      node->retains_grad_hooks() = std::move(hooks.second);
    }
  }
  without_hooks(const without_hooks&) = delete;
  without_hooks& operator=(const without_hooks&) = delete;

 private:
  using hook_list = std::vector<std::unique_ptr<::torch::autograd::FunctionPreHook>>;
  using hook_map = std::unordered_map<std::size_t, std::unique_ptr<::torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<::torch::autograd::AutogradMeta*, hook_list>> hidden_;
  std::map<c10::intrusive_ptr<::torch::autograd::Node>, std::pair<hook_list, hook_map>> of_nodes_;
};

}  // namespace remat::pytorch
