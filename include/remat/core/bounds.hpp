// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lower bounds that need no search.
#pragma once

#include <algorithm>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// Lower bounds that hold for every schedule of a problem.
struct problem_bounds {
  double seconds = 0;  ///< time of all operations on the device that targets depend on, s
  bytes_t budget = 0;  ///< largest of: sources; held + targets; held + inputs + `new_bytes` of such an operation; bytes
};

/// The lower bounds that need no search.
/// Complexity: O(values + edges).
inline problem_bounds bounds_without_search(const problem& p) {
  const auto& values = p.values();
  const auto bytes_unless_held = [&](value_id v) {
    return values[v].held && values[v].starts == device_tier ? 0 : values[v].bytes;
  };
  problem_bounds b;
  bytes_t bytes_at_end = p.held_bytes();
  for (auto v : p.targets())
    if (values[v].ends == device_tier) bytes_at_end += bytes_unless_held(v);
  b.budget = std::max(p.source_bytes(), bytes_at_end);
  for (auto o : needed_operations(p)) {
    const auto& op = p.operations()[o];
    if (op.on != device_tier) continue;
    b.seconds += op.seconds;
    auto needed_bytes = p.held_bytes() + p.new_bytes(o);
    for (auto v : op.inputs) needed_bytes += bytes_unless_held(v);
    b.budget = std::max(b.budget, needed_bytes);
  }
  return b;
}

}  // namespace remat
