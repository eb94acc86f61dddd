// SPDX-License-Identifier: Apache-2.0
/// @file
/// Adds lower bounds from minimum cuts to a result. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/tiers/tier_bound.hpp>

namespace remat {

/// Adds proven bounds to a result: those of `bound::min_cut_bound`, or that of `tiers::tier_bound` for a problem on several
/// tiers.
///
/// @param p      the problem
/// @param budget bytes, of the device
/// @param r      receives `bound`, `budget_bound`, and the status `infeasible` if that is proven and no schedule is known
/// @param stop   polled between and within cuts; true ends with the bounds proven so far
/// Complexity: that of the bound.
inline void prove_bound(const problem& p, bytes_t budget, result& r, const std::function<bool()>& stop = {}) {
  if (!p.plain()) {
    // An infinite bound means that a copy in every schedule takes longer than any finite time.
    r.bound = std::max(r.bound, std::min(tiers::tier_bound(p, budget, stop), std::numeric_limits<double>::max()));
    return;
  }
  const auto b = bound::min_cut_bound(p, budget, {.known_budget_bound = r.budget_bound}, stop);
  r.budget_bound = std::max(r.budget_bound, b.budget);
  if (std::isfinite(b.seconds))
    r.bound = std::max(r.bound, b.seconds);
  else if (!r.found())
    r.status = status::infeasible;
}

}  // namespace remat
