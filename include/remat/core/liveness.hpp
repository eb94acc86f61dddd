// SPDX-License-Identifier: Apache-2.0
/// @file
/// What orders of computations need if every value is dropped as early as possible.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat {

/// What an order of computations needs if every value is dropped as early as possible (as by `with_drops`).
struct order_needs {
  bytes_t peak = 0;             ///< bytes
  double seconds = 0;           ///< sum of the costs, s
  std::vector<bytes_t> memory;  ///< bytes while position i is computed
};

/// Measures a valid order in one backward pass.
/// Complexity: O(values + edges executed).
inline order_needs measure_order(const problem& p, std::span<const operation_id> order) {
  const auto& values = p.values();
  order_needs n;
  n.memory.resize(order.size());
  n.peak = p.source_bytes();
  std::vector<bool> wanted(values.size(), false);
  bytes_t live = 0;
  const auto want = [&](value_id v) {
    if (!wanted[v]) live += values[v].bytes;
    wanted[v] = true;
  };
  for (value_id v = 0; v < values.size(); ++v)
    if (values[v].held) want(v);
  for (auto v : p.targets()) want(v);
  for (std::size_t k = order.size(); k-- > 0;) {
    const auto& op = p.operations()[order[k]];
    bytes_t written = op.workspace;
    for (auto v : op.outputs) {
      written += values[v].bytes;
      if (wanted[v]) live -= values[v].bytes;
      wanted[v] = false;
    }
    for (auto v : op.inputs) want(v);
    n.memory[k] = live + written;
    n.peak = std::max(n.peak, n.memory[k]);
    n.seconds += op.seconds;
  }
  return n;
}

/// The order without the computations whose outputs nobody reads before they are computed again.
/// Complexity: O(values + edges executed).
inline std::vector<operation_id> prune_order(const problem& p, std::span<const operation_id> order) {
  std::vector<bool> wanted(p.values().size(), false);
  for (auto v : p.targets()) wanted[v] = true;
  std::vector<operation_id> kept;
  for (std::size_t k = order.size(); k-- > 0;) {
    const auto& op = p.operations()[order[k]];
    if (std::none_of(op.outputs.begin(), op.outputs.end(), [&](value_id v) { return wanted[v]; })) continue;
    for (auto v : op.outputs) wanted[v] = false;
    for (auto v : op.inputs) wanted[v] = true;
    kept.push_back(order[k]);
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

}  // namespace remat
