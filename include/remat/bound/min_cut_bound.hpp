// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule within a budget, from minimum cuts. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <remat/bound/copy_bound.hpp>
#include <remat/bound/memory_bound.hpp>
#include <remat/bound/retention_cut.hpp>
#include <remat/bound/sample_cuts.hpp>
#include <remat/core/bounds.hpp>

namespace remat::bound {

/// Proven lower bounds on time and budget.
struct time_bound {
  double seconds = 0;  ///< no schedule within the budget is faster, s; infinity if none fits the budget
  bytes_t budget = 0;  ///< no schedule fits a smaller budget, bytes
};

/// How hard `min_cut_bound` tries.
struct min_cut_bound_options {
  std::size_t moments = 400;       ///< number of operations `tau` tried, with two cuts each, >= 1
  std::size_t refined = 100;       ///< number of these whose multiplier is optimised, on average, >= 1
  bytes_t known_budget_bound = 0;  ///< a proven bound on the budget, bytes
};

/// A lower bound on the time of *every* schedule within a budget: staged or not, with any recomputation. Where the problem allows
/// copies to the host, the bound on the time is `copy_bound`. The bound on the budget is that of `bounds_without_search`: with
/// copies, a schedule fits that budget.
///
/// For each of some operations `tau`, the bound is the Lagrangian dual of `retention_cut`: the bytes left beside `tau`, at its
/// first run, get a multiplier lambda. The dual is concave and piecewise linear in lambda, so a few cuts find its maximum.
///
/// @param p      the problem
/// @param budget bytes
/// @param o      how hard to try
/// @param stop   polled between and within cuts; true returns the bounds that are proven by then
/// @return the bounds on time and budget; the time is infinite if the budget is below the bound on it
/// @throws bad_option if `moments` or `refined` is 0
/// Complexity: O(2 moments + 10 refined) maximum flows on O(values + operations) vertices, and those of `last_large_run_bound`
/// and `phases_of_last_runs`; a fraction of a second for thousands of operations.
/// @code
/// auto b = remat::bound::min_cut_bound(p, budget);
/// std::cout << "no schedule takes less than " << b.seconds << " s\n";
/// @endcode
inline time_bound min_cut_bound(const problem& p, bytes_t budget, const min_cut_bound_options& o = {},
                                const std::function<bool()>& stop = {}) {
  if (o.moments < 1) throw bad_option("min_cut_bound_options.moments must be >= 1, got 0");
  if (o.refined < 1) throw bad_option("min_cut_bound_options.refined must be >= 1, got 0");
  const auto least = bounds_without_search(p);
  time_bound best{least.seconds, std::max(least.budget, o.known_budget_bound)};
  const double never = std::numeric_limits<double>::infinity();
  if (p.copies()) {
    if (budget < best.budget)
      best.seconds = never;
    else if (!(stop && stop()))
      best.seconds = copy_bound(p, budget, {}, stop);
    return best;
  }
  best.budget = std::max(best.budget, last_runs_bound(p));
  struct dual {
    std::unique_ptr<retention_cut> cut;
    retention_cut::choice rich, lean;  // lines seconds + lambda (bytes - room), at the smallest and largest lambda so far
    bytes_t room;
    double lambda = 0, maximum = 0;  // where the two lines meet: lambda, and their value, s
    void find_crossing() {
      lambda = retention_cut::multiplier(rich, lean);
      maximum = rich.seconds + lambda * static_cast<double>(rich.bytes - room);
    }
  };
  std::vector<dual> duals;
  double best_extra = 0;
  const auto improve = [&](dual& d) {
    auto c = d.cut->minimum(d.lambda);
    const double value = c.seconds + d.lambda * static_cast<double>(c.bytes - d.room) - c.error;
    best_extra = std::max(best_extra, value);
    if (value + c.error >= d.maximum * (1 - 1e-6) || c.bytes >= d.rich.bytes || c.bytes <= d.lean.bytes) {
      d.maximum = 0;  // its maximum is known
      return;
    }
    (c.bytes > d.room ? d.rich : d.lean) = std::move(c);
    d.find_crossing();
  };
  try {
    if (stop && stop()) throw interrupted();
    for (auto& cut : sample_cuts(p, budget, o.moments, nullptr, stop)) {
      if (stop && stop()) break;
      const auto room = budget + cut->room();
      dual d{std::move(cut), {}, {}, room};
      d.rich = d.cut->retain_all(), d.lean = d.cut->retain_least();
      best.budget = std::max(best.budget, d.lean.bytes - d.cut->room());
      if (d.rich.bytes <= room || d.lean.bytes > room) continue;
      if (d.cut->forbid_retaining_above(room)) {
        d.rich = d.cut->fewest_seconds();
        best_extra = std::max(best_extra, d.rich.seconds - d.rich.error);
        if (d.rich.bytes <= room || d.rich.bytes <= d.lean.bytes) continue;
      }
      d.find_crossing();
      for (int i = 0; i < (duals.empty() ? 20 : 1) && d.maximum > best_extra && !(stop && stop()); ++i) improve(d);
      if (d.maximum > best_extra) duals.push_back(std::move(d));
    }
    for (auto left = 10 * o.refined; left > 0 && !duals.empty() && !(stop && stop()); --left) {
      auto& highest =
          *std::max_element(duals.begin(), duals.end(), [](const auto& a, const auto& b) { return a.maximum < b.maximum; });
      if (highest.maximum <= best_extra * (1 + 1e-6)) break;
      improve(highest);
    }
  } catch (const interrupted&) {  // keeps the bounds proven so far
  }
  best.seconds += best_extra;
  // These are maximum flows through the whole graph: large graphs get fewer of them.
  const auto cuts = 1 + 1'200'000 / std::max<std::size_t>(1, p.operations().size());
  best.budget = last_large_run_bound(p, best.budget, stop, std::min<std::size_t>(300, cuts));
  try {
    if (budget >= best.budget) {
      last_run_cut cut(p, stop);
      best.budget = std::max(best.budget, phases_of_last_runs(p, cut, budget, 10 * cuts).needed_bytes);
    }
  } catch (const interrupted&) {  // keeps the bounds proven so far
  }
  if (budget < best.budget) best.seconds = never;
  return best;
}

}  // namespace remat::bound
