// SPDX-License-Identifier: Apache-2.0
/// @file
/// The schedule without recomputation.
#pragma once

#include <string>

#include <remat/core/evaluate.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// Computes every needed operation once, in the order of the problem: the fastest of all schedules, if it fits.
///
/// Complexity: O(values + edges).
/// @code
/// auto r = remat::solve(p, budget, remat::store_all{});
/// @endcode
class store_all {
 public:
  std::string name() const { return "store_all"; }

  result solve(const problem& p, bytes_t budget, monitor&) const {
    result r;
    incumbent best(p, budget);
    if (!best.offer(needed_operations(p)))
      r.reason = "store-all needs " + std::to_string(evaluate(p, store_all_schedule(p)).peak) + " bytes";
    best.put_into(r);
    return r;
  }
};

}  // namespace remat
