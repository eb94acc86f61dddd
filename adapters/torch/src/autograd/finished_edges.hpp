// SPDX-License-Identifier: Apache-2.0
/// @file
/// Edges of autograd graphs through which no gradient comes any more. Private to the adapter.
#pragma once

#include <torch/csrc/autograd/node.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace remat::pytorch {

/// The edges of a node whose backward is over. Code may keep its graph (`losses.append(loss)`), and with it references to
/// leaves, so the number of references to a leaf alone does not tell whether other graphs still give it gradients.
class finished_edges {
 public:
  /// @param of outlives this object; its edges do not change any more. No backward that has used it is still running, because
  ///           gradients on their way to a leaf would be lost if somebody took another graph for the only one.
  explicit finished_edges(const ::torch::autograd::Node& of) : of_(of) {
    auto& t = shared();
    const std::lock_guard lock(t.mutex);
    t.uncounted.insert(this);
    ++t.size;
  }
  ~finished_edges() {
    auto& t = shared();
    const std::lock_guard lock(t.mutex);
    --t.size;
    if (t.uncounted.erase(this) > 0) return;
    for (const auto& edge : of_.next_edges())
      if (const auto found = t.edges.find(edge.function.get()); found != t.edges.end() && --found->second == 0)
        t.edges.erase(found);
  }
  finished_edges(const finished_edges&) = delete;
  finished_edges& operator=(const finished_edges&) = delete;

  /// The number of references to a node, except for finished edges.
  /// O(1), plus the edges of nodes that have finished since the last call.
  static std::size_t live_references(const c10::intrusive_ptr<::torch::autograd::Node>& to) {
    return to.use_count() - leading_to(to.get());
  }

 private:
  static std::size_t leading_to(const ::torch::autograd::Node* to) {
    auto& t = shared();
    if (t.size == 0) return 0;  // as in nearly all loops
    const std::lock_guard lock(t.mutex);
    for (const auto* node : t.uncounted)
      for (const auto& edge : node->of_.next_edges())
        if (edge.is_valid()) ++t.edges[edge.function.get()];
    t.uncounted.clear();
    const auto found = t.edges.find(to);
    return found == t.edges.end() ? 0 : found->second;
  }

  struct table {
    std::mutex mutex;
    std::atomic<std::size_t> size = 0;
    std::unordered_set<const finished_edges*> uncounted;  ///< most nodes are freed before anybody asks
    std::unordered_map<const ::torch::autograd::Node*, std::size_t> edges;
  };
  static table& shared() {
    static auto& t = *new table;  // graphs may be freed after static objects
    return t;
  }

  const ::torch::autograd::Node& of_;
};

}  // namespace remat::pytorch
