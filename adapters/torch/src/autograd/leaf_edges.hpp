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
#include "../plan/captured_step.hpp"
#include "finished_edges.hpp"

namespace remat::pytorch {

/// The edges of a node to leaves: trained parameters, then inputs. A leaf may have several edges, one per summand of its
/// gradient.
class leaf_edges {
 public:
  /// @param of must outlive this object
  explicit leaf_edges(::torch::autograd::Node& of) : node_(of) {}

  /// Adds n edges to the next leaf.
  void lead_to(const at::Tensor& leaf, std::size_t n) {
    for (std::size_t k = 0; k < n; ++k) node_.add_next_edge(::torch::autograd::impl::gradient_edge(leaf));
    first_.push_back(first_.back() + n);
  }
  /// The position of the first edge of each leaf, and of the end.
  const std::vector<std::size_t>& first() const { return first_; }
  /// True if no other graph leads to leaf `l`, or only graphs whose backward is over.
  /// @param others number of references that do not count
  bool is_alone(std::size_t l, std::size_t others = 0) const {
    return finished_edges::live_references(node_.next_edge(first_[l]).function) == first_[l + 1] - first_[l] + others;
  }
  /// True if another graph leads to a leaf with several edges. Autograd does not add its gradient to the sum of the leaf's
  /// summands.
  /// @param inside the graph of the module's own code, if it exists
  bool meet_others(const detail::graph_contents& inside) const {
    for (std::size_t l = 0; l + 1 < first_.size(); ++l) {
      if (first_[l + 1] - first_[l] < 2) continue;
      const auto& node = *node_.next_edge(first_[l]).function;
      const bool held = dynamic_cast<const ::torch::autograd::AccumulateGrad*>(&node) == nullptr;  // the input holds it
      if (!is_alone(l, inside.edges_to(node) + held)) return true;
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
  ::torch::autograd::Node& node_;
  std::vector<std::size_t> first_ = {0};
};

/// For each gradient of a parameter, the position among `leaves` of the leaf that gets it. Steps of a second plan may have the
/// leaves in another order.
/// @throws broken_contract if the step has other leaves
inline std::vector<std::size_t> places_of(const runner& r, const std::vector<at::Tensor>& leaves) {
  auto places = r.kind->place;
  for (auto& k : places) {
    const auto& leaf = r.bound->trained[k];
    if (k < leaves.size() && leaves[k].is_same(leaf)) continue;
    const auto found = std::find_if(leaves.begin(), leaves.end(), [&](const auto& t) { return t.is_same(leaf); });
    if (found == leaves.end()) throw broken_contract("remat: a second plan for other parameters");
    k = static_cast<std::size_t>(found - leaves.begin());
  }
  return places;
}

}  // namespace remat::pytorch
