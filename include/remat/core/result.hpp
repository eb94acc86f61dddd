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
#include <utility>
#include <vector>

#include <remat/core/evaluation.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// How a search ended.
enum class status {
  optimal,        ///< a schedule within `limits.gap` of a proven lower bound
  feasible,       ///< a schedule within the budget
  infeasible,     ///< proven: no schedule fits the budget
  time_limit,     ///< the time was up or an observer asked to stop, and no schedule was found; proves nothing
  not_found,      ///< the method ended: no schedule that it searches fits the budget; proves nothing about other schedules
  not_applicable  ///< the method does not support this kind of problem; proves nothing
};

/// The names of the statuses in the exchange format, in the order of `status`.
inline constexpr std::array<std::string_view, 6> status_names = {"optimal",    "feasible",  "infeasible",
                                                                 "time_limit", "not_found", "not_applicable"};

/// The name of a status in the exchange format.
inline constexpr std::string_view to_string(status s) { return status_names[static_cast<std::size_t>(s)]; }

/// Outcome of a search: a schedule with its costs and bounds, or the reason why there is no schedule.
struct result {
  remat::status status = remat::status::not_found;
  std::string reason;          ///< explanation of the status, such as the kind of problem that the method needs; may be empty
  remat::schedule schedule;    ///< empty unless `found()`
  bytes_t budget = 0;          ///< budget of the search, bytes
  bytes_t peak = 0;            ///< peak of the schedule on the device, from `evaluate`, bytes
  std::vector<bytes_t> peaks;  ///< peak of the schedule on each tier, from `evaluate`, bytes
  double seconds = 0;          ///< time of the schedule, from `evaluate`, s
  std::size_t recomputed = 0;  ///< computations beyond the first of each operation
  double bound = 0;            ///< proven lower bound on the time of every schedule within the budget, s
  bytes_t budget_bound = 0;    ///< proven lower bound on every feasible budget, bytes
  std::optional<bytes_t> smallest_budget;  ///< smallest budget for which a schedule is known, bytes; nothing if none is known
  std::string scope;       ///< class of schedules that `scope_bound` covers, such as "staged schedules"; may be empty
  double scope_bound = 0;  ///< proven lower bound on the time of schedules in `scope`, s; infinity: none fits the budget
  std::string solver;      ///< name of the method
  double elapsed = 0;      ///< wall-clock time of the search, s

  bool found() const { return status == remat::status::optimal || status == remat::status::feasible; }
  /// Relative gap (seconds - bound) / seconds; 0 if the time does not exceed the bound, 1 without a schedule.
  double gap() const {
    if (!found()) return 1;
    return seconds > bound ? (seconds - bound) / seconds : 0;
  }
  /// As `gap`, with `scope_bound`. A small gap means "optimal among the schedules of `scope`"; `status` does not show that.
  double scope_gap() const {
    if (!found()) return 1;
    return seconds > scope_bound ? (seconds - scope_bound) / seconds : 0;
  }
};

/// The result `r` of a method that does not support the problem.
/// @param reason why
inline result refused(std::string reason, result r = {}) {
  r.status = status::not_applicable;
  r.reason = std::move(reason);
  return r;
}

namespace detail {

/// Copies the costs of a schedule into its result.
inline void set_costs(result& r, const evaluation& e) {
  r.peak = e.peak;
  r.peaks = e.peaks;
  r.seconds = e.seconds;
  r.recomputed = e.recomputed;
}

/// Replaces the schedule of `to` by the schedule of `from`, if the latter fits the budget of `to` and is faster or `to` has none.
/// @param gap relative gap below which the schedule counts as optimal
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
