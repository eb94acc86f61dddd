// SPDX-License-Identifier: Apache-2.0
/// @file
/// The edges by which gradients leave the node of a step. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../capture/kept_graph.hpp"

namespace remat::pytorch {

/// Edges of steps whose backward has run, counted by the node that they lead to. A caller that keeps a loss keeps these edges,
/// but no gradient comes through them.
class finished_edges {
 public:
  /// Is never destroyed: a step may outlive other static objects.
  static finished_edges& all() {
    static auto& only = *new finished_edges;
    return only;
  }
  using nodes = std::vector<const ::torch::autograd::Node*>;
  /// @param to node per edge
  void add(const nodes& to) {
    const std::lock_guard lock(mutex_);
    for (const auto* node : to) ++to_[node];
  }
  void remove(const nodes& to) {
    const std::lock_guard lock(mutex_);
    for (const auto* node : to)
      if (const auto at = to_.find(node); --at->second == 0) to_.erase(at);
  }
  std::size_t to(const ::torch::autograd::Node* node) const {
    const std::lock_guard lock(mutex_);
    const auto at = to_.find(node);
    return at == to_.end() ? 0 : at->second;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<const ::torch::autograd::Node*, std::size_t> to_;
};

/// The edges of a node to leaves: trained parameters, then inputs. A leaf may have several edges, one per summand of its
/// gradient.
class leaf_edges {
 public:
  /// @param of must outlive this object
  explicit leaf_edges(::torch::autograd::Node& of) : node_(of) {}
  ~leaf_edges() { finished_edges::all().remove(finished_); }
  leaf_edges(const leaf_edges&) = delete;
  leaf_edges& operator=(const leaf_edges&) = delete;

  /// Adds n edges to the next leaf.
  void lead_to(const at::Tensor& leaf, std::size_t n) {
    for (std::size_t k = 0; k < n; ++k) node_.add_next_edge(::torch::autograd::impl::gradient_edge(leaf));
    first_.push_back(first_.back() + n);
  }
  /// The position of the first edge of each leaf, and of the end.
  const std::vector<std::size_t>& first() const { return first_; }
  /// True if no other graph leads to leaf `l`.
  /// @param others number of references that do not count
  bool is_alone(std::size_t l, std::size_t others = 0) const {
    const auto& node = node_.next_edge(first_[l]).function;
    const auto expected = first_[l + 1] - first_[l] + others;
    return node.use_count() == expected || node.use_count() == expected + finished_edges::all().to(node.get());
  }
  /// No more gradients come through these edges. That holds from the end of the backward on that runs: before, gradients of this
  /// step may be summands of a gradient to which another step adds.
  /// @param node keeps this object
  void finish(c10::intrusive_ptr<::torch::autograd::Node> node) {
    if (::torch::autograd::get_current_graph_task_id() == -1) return note_finished();
    ::torch::autograd::Engine::get_default_engine().queue_callback([this, held = std::move(node)] { note_finished(); });
  }
  /// True if another graph leads to a leaf with several edges. Autograd does not add its gradient to the sum of the leaf's
  /// summands.
  /// @param inside the graph of the module's own code, if it exists
  bool meet_others(const detail::graph_contents& inside) const {
    for (std::size_t l = 0; l + 1 < first_.size(); ++l) {
      if (first_[l + 1] - first_[l] < 2) continue;
      const auto* node = node_.next_edge(first_[l]).function.get();
      const auto own = inside.edges.find(node);
      const bool held = dynamic_cast<const ::torch::autograd::AccumulateGrad*>(node) == nullptr;  // the input holds it
      if (!is_alone(l, (own == inside.edges.end() ? 0 : own->second) + held)) return true;
    }
    return false;
  }
  /// Removes the edges to leaf `l`.
  void cut(std::size_t l) {
    for (auto k = first_[l]; k < first_[l + 1]; ++k) node_.next_edges()[k] = {};
  }
  /// Removes gradients that the engine has not asked for. If a leaf gets no gradient, and no other graph leads to it, its edges
  /// are removed: no hook is called without a gradient.
  void trim(::torch::autograd::variable_list& gradients) {
    for (std::size_t l = 0; l + 1 < first_.size(); ++l) {
      const auto begin = gradients.begin() + static_cast<std::ptrdiff_t>(first_[l]),
                 end = gradients.begin() + static_cast<std::ptrdiff_t>(first_[l + 1]);
      if (!node_.task_should_compute_output(first_[l]))
        std::fill(begin, end, at::Tensor());
      else if (is_alone(l) && std::none_of(begin, end, [](const auto& g) { return g.defined(); }))
        cut(l);
    }
  }
  /// The sum of the gradients of each leaf.
  ::torch::autograd::variable_list added_up(const ::torch::autograd::variable_list& gradients) const {
    ::torch::autograd::variable_list sums;
    for (std::size_t l = 0; l + 1 < first_.size(); ++l) {
      auto& sum = sums.emplace_back();
      for (auto k = first_[l]; k < first_[l + 1]; ++k)
        if (gradients[k].defined()) sum = sum.defined() ? sum + gradients[k] : gradients[k];
    }
    return sums;
  }

 private:
  void note_finished() {
    if (!finished_.empty()) return;
    for (const auto& e : node_.next_edges())
      if (e.is_valid()) finished_.push_back(e.function.get());
    finished_edges::all().add(finished_);
  }

  ::torch::autograd::Node& node_;
  std::vector<std::size_t> first_ = {0};
  finished_edges::nodes finished_;  ///< autograd empties the edges of a node before it destroys it
};

}  // namespace remat::pytorch
