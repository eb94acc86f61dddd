// SPDX-License-Identifier: Apache-2.0
/// @file
/// The best schedule found so far.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// The fastest order found so far within a budget.
class incumbent {
 public:
  incumbent(const problem& p, bytes_t budget) : p_(p), budget_(budget) {}

  bool found() const { return found_; }
  bytes_t budget() const { return budget_; }
  const std::vector<operation_id>& order() const { return order_; }
  /// Empty unless `found()`.
  const remat::schedule& schedule() const { return schedule_; }
  double seconds() const { return seconds_; }
  /// Takes `order` if it fits the budget and is faster than the present one; `evaluate` must confirm it.
  /// @return true if `order` was taken
  /// Complexity: O(values + edges executed).
  bool offer(const std::vector<operation_id>& order) {
    const auto needs = measure_order(p_, order);
    if (needs.peak > budget_ || needs.seconds >= seconds_) return false;
    auto s = with_drops(p_, order);
    try {
      if (evaluate(p_, s).peak > budget_) return false;
    } catch (const bad_schedule&) {  // computes a once-only operation again
      return false;
    }
    order_ = order;
    schedule_ = std::move(s);
    seconds_ = needs.seconds;
    return found_ = true;
  }
  /// Reports the incumbent and its schedule to the observers of `m`.
  /// @param stage what the solver is doing
  /// @param bound proven lower bound on the time, s
  void report(monitor& m, std::string stage, double bound = 0) const {
    m.report({.stage = std::move(stage), .best = seconds_, .bound = bound, .schedule = found_ ? &schedule_ : nullptr});
  }
  /// Copies the schedule into `r`, if there is one.
  void put_into(result& r) const {
    if (!found_) return;
    r.status = status::feasible;
    r.reason.clear();
    r.schedule = schedule_;
  }

 private:
  const problem& p_;
  bytes_t budget_;
  std::vector<operation_id> order_;
  remat::schedule schedule_;
  double seconds_ = std::numeric_limits<double>::infinity();
  bool found_ = false;
};

/// The schedule that computes everything once, if it fits the budget. No schedule is faster.
/// Complexity: O(values + edges).
inline std::optional<result> store_all_if_it_fits(const problem& p, bytes_t budget) {
  incumbent all(p, budget);
  if (!all.offer(needed_operations(p))) return std::nullopt;
  result r;
  all.put_into(r);
  return r;
}

}  // namespace remat
