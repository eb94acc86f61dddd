// SPDX-License-Identifier: Apache-2.0
/// @file
/// Outcomes of a search.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// How a search ended.
enum class status {
  optimal,        ///< a schedule within `limits.gap` of a proven lower bound
  feasible,       ///< a schedule within the budget
  infeasible,     ///< proven: no schedule fits the budget
  time_limit,     ///< time was up, or an observer asked to stop, before a schedule was found; nothing proven
  not_found,      ///< the method came to its end: there is no schedule among those it looks at; nothing proven of others
  not_applicable  ///< the problem is not of the kind that the method is for; nothing proven
};

/// The names of the statuses in the exchange format, in their order.
inline constexpr std::array<std::string_view, 6> status_names = {"optimal",    "feasible",  "infeasible",
                                                                 "time_limit", "not_found", "not_applicable"};

/// The name of a status in the exchange format.
inline constexpr std::string_view to_string(status s) { return status_names[static_cast<std::size_t>(s)]; }

/// A schedule with what is known of it, or the reason why there is none.
struct result {
  remat::status status = remat::status::not_found;
  std::string reason;                      ///< more than the status says, such as what kind of problem is asked for; or empty
  remat::schedule schedule;                ///< empty unless `found()`
  bytes_t budget = 0;                      ///< what was asked for
  bytes_t peak = 0;                        ///< of the schedule, from `evaluate`
  std::vector<bytes_t> peaks;              ///< of the schedule on each tier, from `evaluate`
  double seconds = 0;                      ///< of the schedule, from `evaluate`
  std::size_t recomputed = 0;              ///< computations beyond the first of each operation
  double bound = 0;                        ///< proven lower bound on the time of every schedule within the budget, s
  bytes_t budget_bound = 0;                ///< proven lower bound on every feasible budget
  std::optional<bytes_t> smallest_budget;  ///< smallest budget for which a schedule is known, where the solver learnt one
  std::string scope;       ///< a class of schedules that `scope_bound` speaks of, such as "staged schedules"; or empty
  double scope_bound = 0;  ///< proven lower bound on the time of those, s; infinity: none fits the budget
  std::string solver;      ///< name of the method
  double elapsed = 0;      ///< wall-clock time of the search, s

  bool found() const { return status == remat::status::optimal || status == remat::status::feasible; }
  /// (seconds - bound) / seconds; 0 if both are 0, 1 if there is no schedule.
  double gap() const {
    if (!found()) return 1;
    return seconds > bound ? (seconds - bound) / seconds : 0;
  }
  /// As `gap`, among the schedules of `scope`: a small one means "optimal among these", which `status` does not say.
  double scope_gap() const {
    if (!found()) return 1;
    return seconds > scope_bound ? (seconds - scope_bound) / seconds : 0;
  }
};

namespace detail {

/// Gives `to` the schedule of `from` if that fits and is faster, or is the first.
/// Complexity: O(steps), to copy the schedule.
inline void adopt(result& to, const result& from, double gap) {
  if (!from.found() || from.peak > to.budget || (to.found() && to.seconds <= from.seconds)) return;
  to.schedule = from.schedule;
  to.peak = from.peak;
  to.peaks = from.peaks;
  to.seconds = from.seconds;
  to.recomputed = from.recomputed;
  to.smallest_budget = std::min(from.peak, to.smallest_budget.value_or(from.peak));
  to.reason = from.reason;
  to.status = status::feasible;  // so that `gap` counts it
  if (to.gap() <= gap) to.status = status::optimal;
}

}  // namespace detail

}  // namespace remat
