// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lower bounds that need no search.
#pragma once

#include <algorithm>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// Lower bounds that hold for every schedule of `p` and need no search.
struct trivial_bounds {
  double seconds = 0;  ///< time of all operations on the device that targets depend on, s
  bytes_t budget = 0;  ///< largest of: sources; held + targets; held + inputs + `new_bytes` of such an operation; bytes
};

/// Computes `trivial_bounds`.
/// Complexity: O(values + edges).
inline trivial_bounds bounds_without_search(const problem& p) {
  const auto& values = p.values();
  const auto droppable = [&](value_id v) { return values[v].held && values[v].starts == device_tier ? 0 : values[v].bytes; };
  trivial_bounds b;
  bytes_t end = p.held_bytes();
  for (auto v : p.targets())
    if (values[v].ends == device_tier) end += droppable(v);
  b.budget = std::max(p.source_bytes(), end);
  for (auto o : needed_operations(p)) {
    const auto& op = p.operations()[o];
    if (op.on != device_tier) continue;
    b.seconds += op.seconds;
    auto here = p.held_bytes() + p.new_bytes(o);
    for (auto v : op.inputs) here += droppable(v);
    b.budget = std::max(b.budget, here);
  }
  return b;
}

}  // namespace remat
