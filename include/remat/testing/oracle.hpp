// SPDX-License-Identifier: Apache-2.0
/// @file
/// Exhaustive search for the optimum of tiny problems. Shares no code with any solver.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::testing {

/// The shortest time of a schedule of `p` within `budget`, without copies. Dijkstra's algorithm on states: the set of values on
/// the device, and the set of once-only operations that have run.
/// @param p      a problem with at most 40 values and at most 24 once-only operations; slow beyond some 18 values
/// @param budget bytes
/// @return the optimum, s, or nothing if no schedule fits
/// @throws bad_option if the problem is too large
/// Complexity: O(2^values (values + operations)), usually far less.
/// @code
/// auto best = remat::testing::exhaustive_optimum(p, 12);
/// @endcode
inline std::optional<double> exhaustive_optimum(const problem& p, bytes_t budget) {
  using set = std::uint64_t;
  const auto nv = p.values().size();
  const auto& ops = p.operations();
  const auto bit = [](std::size_t i) { return set{1} << i; };
  const auto once_only = std::count_if(ops.begin(), ops.end(), [](const operation& op) { return op.once; });
  if (nv > 40 || once_only > 24)
    throw bad_option("exhaustive_optimum: " + std::to_string(nv) + " values and " + std::to_string(once_only) +
                     " once-only operations, at most 40 and 24 are possible");
  std::vector<set> inputs(ops.size(), 0), outputs(ops.size(), 0), once(ops.size(), 0);
  for (std::size_t o = 0, next = 40; o < ops.size(); ++o) {
    for (auto v : ops[o].inputs) inputs[o] |= bit(v);
    for (auto v : ops[o].outputs) outputs[o] |= bit(v);
    if (ops[o].once) once[o] = bit(next++);
  }
  const auto bytes = [&](set s) {
    bytes_t sum = 0;
    for (std::size_t v = 0; v < nv; ++v)
      if (s & bit(v)) sum += p.values()[v].bytes;
    return sum;
  };
  set start = 0, goal = 0, fixed = 0;
  for (value_id v = 0; v < nv; ++v) {
    if (p.is_source(v)) start |= bit(v);
    if (p.is_target(v)) goal |= bit(v);
    if (p.values()[v].held) fixed |= bit(v);
  }
  if (p.source_bytes() > budget) return std::nullopt;

  using entry = std::pair<double, set>;
  std::priority_queue<entry, std::vector<entry>, std::greater<>> queue;
  std::unordered_map<set, double> least;
  const auto reach = [&](set s, double seconds) {
    const auto [at, added] = least.emplace(s, seconds);
    if (!added && at->second <= seconds) return;
    at->second = seconds;
    queue.emplace(seconds, s);
  };
  reach(start, 0);
  while (!queue.empty()) {
    const auto [seconds, s] = queue.top();
    queue.pop();
    if (seconds > least[s]) continue;
    if ((s & goal) == goal) return seconds;
    const auto live = bytes(s & (bit(nv) - 1));
    for (std::size_t v = 0; v < nv; ++v)
      if (s & bit(v) & ~fixed) reach(s & ~bit(v), seconds);
    for (std::size_t o = 0; o < ops.size(); ++o)
      if ((s & inputs[o]) == inputs[o] && !(s & once[o]) && live + bytes(outputs[o]) + ops[o].workspace <= budget)
        reach(s | outputs[o] | once[o], seconds + ops[o].seconds);
  }
  return std::nullopt;
}

}  // namespace remat::testing
