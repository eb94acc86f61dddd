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

/// Kahn's algorithm: of the vertices that are ready, the one with the least key comes first, and of equal keys the first one.
/// @tparam Key    callable with a vertex; its results can be compared
/// @param  inputs of each vertex; one that is listed twice does no harm
/// @return all vertices, or only those that no cycle holds back
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
