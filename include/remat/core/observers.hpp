// SPDX-License-Identifier: Apache-2.0
/// @file
/// Observers that end a search.
#pragma once

#include <limits>

#include <remat/core/monitor.hpp>

namespace remat {

/// Ends a search that is good enough or has stood still: the first condition that is met stops it. It keeps nothing of a search,
/// so one object serves many.
/// Complexity: O(1) per report.
/// @code
/// auto r = remat::solve(p, budget, remat::min_cut(), {.seconds = 600}, remat::stop_at{.gap = 0.01, .patience = 20});
/// @endcode
struct stop_at {
  double seconds = 0;                                         ///< a schedule that takes no longer, s
  double gap = -1;                                            ///< (time - bound) / time no larger; none with the default
  double patience = std::numeric_limits<double>::infinity();  ///< s without a better schedule, once there is one

  control operator()(const progress& now) const {
    if (!(now.best < std::numeric_limits<double>::infinity())) return control::go_on;
    const bool good = now.best <= seconds || now.best - now.bound <= gap * now.best;
    return good || now.idle > patience ? control::stop : control::go_on;
  }
};

}  // namespace remat
