// SPDX-License-Identifier: Apache-2.0
/// @file
/// The edges by which gradients leave the node of a step. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../capture/kept_graph.hpp"

namespace remat::pytorch {

/// Edges to leaves, which are the trained parameters and then inputs. Several may lead to one, for the summands of its gradient.
class leaf_edges {
 public:
  /// @param of must outlive it
  explicit leaf_edges(::torch::autograd::Node& of) : node_(of) {}

  /// Adds n edges to the next leaf.
  void lead_to(const at::Tensor& leaf, std::size_t n) {
    for (std::size_t k = 0; k < n; ++k) node_.add_next_edge(::torch::autograd::impl::gradient_edge(leaf));
    first_.push_back(first_.back() + n);
  }
  /// Per leaf its first edge, and the end.
  const std::vector<std::size_t>& first() const { return first_; }
  /// No other graph leads to leaf l.
  /// @param others references that do not count
  bool is_alone(std::size_t l, std::size_t others = 0) const {
    return node_.next_edge(first_[l]).function.use_count() == first_[l + 1] - first_[l] + others;
  }
  /// Another graph leads where several edges of the module do: what it brings is not added to their sum.
  /// @param inside the graph that the module's code has built, if it is there
  bool meet_others(const detail::graph_contents& inside) const {
    for (std::size_t l = 0; l + 1 < first_.size(); ++l) {
      if (first_[l + 1] - first_[l] < 2) continue;
      const auto* node = node_.next_edge(first_[l]).function.get();
      const auto own = inside.edges.find(node);
      const bool held = dynamic_cast<const ::torch::autograd::AccumulateGrad*>(node) == nullptr;  // by the input
      if (!is_alone(l, (own == inside.edges.end() ? 0 : own->second) + held)) return true;
    }
    return false;
  }
  /// Takes the edges to leaf l out.
  void cut(std::size_t l) {
    for (auto k = first_[l]; k < first_[l + 1]; ++k) node_.next_edges()[k] = {};
  }
  /// Leaves out what nobody has asked for. Where nothing goes to a leaf of no other graph, it is as if the edges were not there:
  /// no hook is called with nothing.
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
  /// Per leaf the sum of what goes there.
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
  ::torch::autograd::Node& node_;
  std::vector<std::size_t> first_ = {0};
};

}  // namespace remat::pytorch
