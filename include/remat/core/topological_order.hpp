// SPDX-License-Identifier: Apache-2.0
/// @file
/// Topological orders.
#pragma once

#include <cstddef>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace remat {

/// Kahn's algorithm. Of the vertices that are ready, the one with the smallest key comes first; ties go to the smaller vertex.
/// @tparam Key    callable on a vertex, with comparable results
/// @param  inputs predecessors of each vertex; duplicates do no harm
/// @param  key    priority of each vertex, smallest first
/// @return all vertices in topological order, without those on a cycle or behind one
/// Complexity: O(V log V + E).
template <class Key>
std::vector<std::size_t> topological_order(const std::vector<std::vector<std::size_t>>& inputs, const Key& key) {
  std::vector<std::size_t> missing(inputs.size()), order;
  std::vector<std::vector<std::size_t>> readers(inputs.size());
  using entry = std::pair<decltype(key(std::size_t{})), std::size_t>;
  std::priority_queue<entry, std::vector<entry>, std::greater<>> ready;
  for (std::size_t v = 0; v < inputs.size(); ++v) {
    missing[v] = inputs[v].size();
    for (auto u : inputs[v]) readers[u].push_back(v);
    if (missing[v] == 0) ready.emplace(key(v), v);
  }
  while (!ready.empty()) {
    order.push_back(ready.top().second);
    ready.pop();
    for (auto v : readers[order.back()])
      if (--missing[v] == 0) ready.emplace(key(v), v);
  }
  return order;
}

}  // namespace remat
