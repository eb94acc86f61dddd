// SPDX-License-Identifier: Apache-2.0
/// @file
/// Articulation points of the graph of operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat::structure {

/// The articulation points of the undirected graph of `ops`: operations whose removal disconnects the graph. Two operations are
/// neighbours if one reads a value that the other makes. Sources connect no operations.
///
/// Two extra nodes (stubs) are next to the first and the last operation. So the result contains every operation that all paths
/// from the first to the last operation pass.
/// @param p   the problem
/// @param ops operations, ascending, such as those of the forward
/// @return a subset of `ops`, ascending
/// Complexity: O(values + edges).
///
/// Reference: Hopcroft, Tarjan, "Efficient algorithms for graph manipulation", CACM 16 (1973); with the stubs in Jain et al.,
/// "Checkmate", MLSys 2020.
/// @code
/// auto ends = remat::structure::articulation_points(p, forward);
/// @endcode
inline std::vector<operation_id> articulation_points(const problem& p, std::span<const operation_id> ops) {
  if (ops.empty()) return {};
  const auto n = ops.size();
  const auto source = n, sink = n + 1;
  std::vector<std::size_t> position(p.operations().size(), n);
  for (std::size_t i = 0; i < n; ++i) position[ops[i]] = i;
  std::vector<std::vector<std::size_t>> neighbours(n + 2);
  const auto connect = [&](std::size_t a, std::size_t b) {
    neighbours[a].push_back(b);
    neighbours[b].push_back(a);
  };
  for (std::size_t i = 0; i < n; ++i)
    for (auto v : p.operations()[ops[i]].inputs)
      if (!p.is_source(v) && position[p.producer(v)] < n) connect(position[p.producer(v)], i);
  connect(source, 0);
  connect(n - 1, sink);

  // Depth-first search without recursion. A vertex separates a child if no vertex below the child reaches above the vertex.
  std::vector<std::size_t> entered(n + 2, 0), low(n + 2, 0), next(n + 2, 0), path;  // entered 0: not visited
  std::vector<bool> separates(n + 2, false);
  std::size_t count = 0;
  const auto search = [&](std::size_t root) {
    std::size_t children = 0;
    const auto enter = [&](std::size_t x) {
      entered[x] = low[x] = ++count;
      path.push_back(x);
    };
    enter(root);
    while (!path.empty()) {
      const auto x = path.back();
      if (next[x] < neighbours[x].size()) {
        const auto y = neighbours[x][next[x]++];
        if (entered[y] == 0)
          enter(y);
        else
          low[x] = std::min(low[x], entered[y]);  // also for the parent, where it changes nothing
        continue;
      }
      path.pop_back();
      if (path.empty()) break;
      const auto parent = path.back();
      low[parent] = std::min(low[parent], low[x]);
      if (parent == root)
        ++children;
      else if (low[x] >= entered[parent])
        separates[parent] = true;
    }
    separates[root] = children > 1;
  };
  search(source);
  for (std::size_t i = 0; i < n; ++i)
    if (entered[i] == 0) search(i);
  std::vector<operation_id> points;
  for (std::size_t i = 0; i < n; ++i)
    if (separates[i]) points.push_back(ops[i]);
  return points;
}

}  // namespace remat::structure
