// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makes a graph of autograd end at chosen tensors. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace remat::pytorch::detail {

/// Receives the gradients of a tensor, in place of the node that made the tensor.
class end_node final : public ::torch::autograd::Node {
 public:
  explicit end_node(const at::Tensor& t) { add_input_metadata(t); }
  std::string name() const override { return "RematInput"; }

 protected:
  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&& incoming) override { return std::move(incoming); }
};

/// Nodes in the order in which they ran, on any thread.
struct run_order {
  std::mutex mutex;
  std::vector<const ::torch::autograd::Node*> nodes;
};
class note_run final : public ::torch::autograd::FunctionPostHook {
 public:
  note_run(run_order& order, const ::torch::autograd::Node* node) : order_(order), node_(node) {}
  ::torch::autograd::variable_list operator()(const ::torch::autograd::variable_list& outputs,
                                              const ::torch::autograd::variable_list&) override {
    const std::lock_guard lock(order_.mutex);
    order_.nodes.push_back(node_);
    return outputs;
  }

 private:
  run_order& order_;
  const ::torch::autograd::Node* node_;
};

/// While it lives, a graph ends at chosen tensors: nodes that made them are not part of it, even if they lead to the same leaves.
class ending_at {
 public:
  /// @param roots  of the graph; edges that lead to one of the tensors are changed for good
  /// @param wanted tensors where the graph ends
  /// @param separate each edge that leads to one of the tensors gets an end of its own
  ending_at(::torch::autograd::edge_list& roots, const std::vector<at::Tensor>& wanted, bool separate = false) {
    bool any = false;
    for (const auto& t : wanted) {
      auto edge = ::torch::autograd::impl::gradient_edge(t);
      const bool replaced = separate || t.grad_fn();
      any = any || replaced;
      replaced_edges_.push_back(replaced ? edge : ::torch::autograd::Edge());
      ends_.emplace_back();
      if (!replaced)
        ends_.back().push_back({std::move(edge), nullptr});
      else if (!separate)
        ends_.back().push_back({{c10::make_intrusive<end_node>(t), 0}, nullptr});
    }
    if (!any) return;
    std::vector<::torch::autograd::Node*> stack;
    std::unordered_set<::torch::autograd::Node*> seen;
    const auto visit = [&](::torch::autograd::Edge& e, ::torch::autograd::Node* from) {
      if (!e.is_valid()) return false;
      for (std::size_t k = 0; k < ends_.size(); ++k)
        if (replaced_edges_[k].is_valid() && e == replaced_edges_[k]) {
          if (separate) ends_[k].push_back({{c10::make_intrusive<end_node>(wanted[k]), 0}, from});
          return e = ends_[k].back().edge, true;
        }
      if (seen.insert(e.function.get()).second) stack.push_back(e.function.get());
      return false;
    };
    for (auto& e : roots) visit(e, nullptr);
    while (!stack.empty()) {
      auto* const node = stack.back();
      stack.pop_back();
      bool leads = false;
      for (std::size_t i = 0; i < node->next_edges().size(); ++i) {
        auto& e = node->next_edges()[i];
        if (auto before = e; visit(e, node)) changed_.push_back({node->getptr(), i, std::move(before)}), leads = true;
      }
      if (leads && separate) hooks_.push_back({node->getptr(), node->add_post_hook(std::make_unique<note_run>(order_, node))});
    }
  }
  ~ending_at() {
    for (auto& c : changed_) c.node->next_edges()[c.which] = std::move(c.edge);
    for (auto& [node, hook] : hooks_) node->del_post_hook(hook);
  }
  ending_at(const ending_at&) = delete;
  ending_at& operator=(const ending_at&) = delete;

  /// Edges at which gradients arrive: the ends of all tensors, in the order of the tensors.
  ::torch::autograd::edge_list ends() const {
    ::torch::autograd::edge_list all;
    for (const auto& list : ends_)
      for (const auto& e : list) all.push_back(e.edge);
    return all;
  }
  /// @param gradients at `ends`
  /// @return per tensor its defined gradients, in the order of arrival
  std::vector<std::vector<at::Tensor>> arrived(std::vector<at::Tensor> gradients) const {
    std::vector<std::vector<at::Tensor>> result;
    auto next = gradients.begin();
    for (const auto& list : ends_) {
      std::vector<std::pair<std::ptrdiff_t, at::Tensor>> arrivals;  // gradients at roots are first
      for (const auto& e : list) {
        const auto& ran = order_.nodes;
        const auto when = e.from == nullptr ? -1 : std::find(ran.begin(), ran.end(), e.from) - ran.begin();
        if (next->defined()) arrivals.emplace_back(when, *next);
        ++next;
      }
      std::stable_sort(arrivals.begin(), arrivals.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      result.emplace_back();
      for (auto& [when, gradient] : arrivals) result.back().push_back(std::move(gradient));
    }
    return result;
  }

 private:
  struct change {
    c10::intrusive_ptr<::torch::autograd::Node> node;
    std::size_t which;
    ::torch::autograd::Edge edge;
  };
  struct end {
    ::torch::autograd::Edge edge;
    const ::torch::autograd::Node* from;  ///< node that the edge belongs to; null: a root
  };
  std::vector<change> changed_;
  std::vector<std::pair<c10::intrusive_ptr<::torch::autograd::Node>, std::uintptr_t>> hooks_;
  run_order order_;
  ::torch::autograd::edge_list replaced_edges_;
  std::vector<std::vector<end>> ends_;
};

}  // namespace remat::pytorch::detail
