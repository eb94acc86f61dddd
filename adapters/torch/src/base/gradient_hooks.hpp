// SPDX-License-Identifier: Apache-2.0
/// @file
/// Hooks on gradients inside of a forward, as calls of an operator. Private to the adapter.
///
/// A planned backward runs no nodes, but it calls their hooks. A node has two places for hooks, see `hook_place`. The backward is
/// recorded with a call of the operator `remat::call_hooks` at each place that has hooks. The operator takes the gradients there,
/// and its results replace them. While a plan runs, it calls the hooks of this step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <remat/core/error.hpp>

namespace remat::pytorch {

/// A hook has returned what later kernels of the plan cannot read: a gradient with other strides, or none.
struct other_gradient : error {
  using error::error;
};

/// Name of the operator.
inline constexpr const char* call_hooks_name = "remat::call_hooks";
/// Name of the operator that writes the results over the gradients.
inline constexpr const char* call_hooks_in_place_name = "remat::call_hooks_";

/// A place for hooks.
struct hook_place {
  std::size_t node;  ///< position among the nodes with hooks, in the order of the recording
  bool behind;       ///< behind the node; else before it runs

  /// The argument of the operator that stands for this place.
  int64_t number() const { return static_cast<int64_t>(2 * node + behind); }
  static hook_place of(int64_t number) { return {static_cast<std::size_t>(number / 2), number % 2 != 0}; }
  friend auto operator<=>(const hook_place&, const hook_place&) = default;
};

/// True if hooks are called before the node runs.
inline bool has_hooks_before(::torch::autograd::Node& n) {
  return !n.tensor_pre_hooks().empty() || !n.retains_grad_hooks().empty() || !n.pre_hooks().empty();
}
/// True if hooks are called behind the node.
inline bool has_hooks_behind(::torch::autograd::Node& n) { return !n.post_hooks().empty(); }

/// While it lives, nodes have other hooks.
class replaced_hooks {
 public:
  replaced_hooks() = default;
  /// The nodes call the operator in place of their hooks.
  explicit replaced_hooks(const std::vector<::torch::autograd::Node*>& nodes);
  ~replaced_hooks();
  replaced_hooks(const replaced_hooks&) = delete;
  replaced_hooks& operator=(const replaced_hooks&) = delete;

  void before(::torch::autograd::Node& node, std::unique_ptr<::torch::autograd::FunctionPreHook> by);
  void behind(::torch::autograd::Node& node, std::unique_ptr<::torch::autograd::FunctionPostHook> by);

 private:
  using pre_hooks = std::vector<std::unique_ptr<::torch::autograd::FunctionPreHook>>;
  struct hooks_before {
    c10::intrusive_ptr<::torch::autograd::Node> node;
    pre_hooks of_tensors, of_node;
    std::unordered_map<std::size_t, std::unique_ptr<::torch::autograd::FunctionPreHook>> retain;
  };
  struct hooks_behind {
    c10::intrusive_ptr<::torch::autograd::Node> node;
    std::vector<std::unique_ptr<::torch::autograd::FunctionPostHook>> of_node;
  };
  static void swap(hooks_before& h);
  static void swap(hooks_behind& h) { h.node->post_hooks().swap(h.of_node); }

  std::vector<hooks_before> before_;
  std::vector<hooks_behind> behind_;
};

/// The hooks inside of one forward, for the operator.
class gradient_hooks {
 public:
  /// @param nodes in the order of the recording
  /// @param keep  keep the results of hooks for `give_results`
  gradient_hooks(const std::vector<::torch::autograd::Node*>& nodes, bool keep) : keeps_(keep) {
    for (auto* n : nodes) nodes_.push_back(n->getptr());
  }

  /// From now on, and while this object lives, the nodes do not call the hooks again that the operator has called. They get the
  /// results of then.
  void give_results();

  /// Call this before code reads the memory of a tensor directly. A gradient that the operator has lent to a hook gets memory of
  /// its own.
  static void about_to_read(const at::Tensor& t);

  /// While it lives, the operator calls these hooks, if it runs on this thread.
  class active {
   public:
    /// @param before called before the hooks of each place
    active(gradient_hooks& hooks, std::function<void()> before);
    ~active();
    active(const active&) = delete;
    active& operator=(const active&) = delete;

    bool calling() const { return calling_; }
    /// Calls the hooks of a place. Parameters are those of the operator. A gradient that a hook keeps moves to memory of its own.
    /// @throws other_gradient, and what the hooks throw
    void call(hook_place place, at::TensorList gradients, at::TensorList seen, at::IntArrayRef sizes, at::IntArrayRef positions,
              at::IntArrayRef seen_at);

   private:
    friend class gradient_hooks;
    void take_back();

    gradient_hooks& hooks_;
    std::function<void()> before_;
    const c10::impl::LocalDispatchKeySet keys_;  ///< dispatch keys of the code around the plan
    std::vector<c10::Storage> lent_;             ///< over memory of the plan
    active* outer_;                              ///< of an outer plan on this thread
    bool calling_ = false;                       ///< hooks are running
  };

 private:
  using variable_list = ::torch::autograd::variable_list;
  variable_list call(hook_place place, const variable_list& given, const variable_list& seen);

  std::vector<c10::intrusive_ptr<::torch::autograd::Node>> nodes_;
  bool keeps_;
  std::map<hook_place, std::vector<std::optional<at::Tensor>>> called_;  ///< results by place; nothing: not changed
  replaced_hooks replaced_;
};

}  // namespace remat::pytorch
