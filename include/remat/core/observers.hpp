// SPDX-License-Identifier: Apache-2.0
/// @file
/// Observers that end a search.
#pragma once

#include <limits>

#include <remat/core/monitor.hpp>

namespace remat {

/// Ends a search that is good enough or that stands still. The first condition that is met stops the search. The object has no
/// state, so it can serve many searches.
/// Complexity: O(1) per report.
/// @code
/// auto r = remat::solve(p, budget, remat::min_cut(), {.seconds = 600}, remat::stop_at{.gap = 0.01, .patience = 20});
/// @endcode
struct stop_at {
  double seconds = 0;                                         ///< stop at a schedule that takes no longer, s
  double gap = -1;                                            ///< stop at (time - bound) / time <= gap; never with the default
  double patience = std::numeric_limits<double>::infinity();  ///< once there is a schedule: longest time without a better one, s

  control operator()(const progress& report) const {
    if (!(report.best < std::numeric_limits<double>::infinity())) return control::go_on;
    const bool good = report.best <= seconds || report.best - report.bound <= gap * report.best;
    return good || report.idle > patience ? control::stop : control::go_on;
  }
};

}  // namespace remat
