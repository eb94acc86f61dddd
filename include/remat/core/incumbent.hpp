// SPDX-License-Identifier: Apache-2.0
/// @file
/// The best schedule so far.
#pragma once

#include <limits>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
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
  double seconds() const { return seconds_; }
  /// Takes `order` if it fits and is faster; `evaluate` has the last word.
  /// @return true if it was taken
  /// Complexity: O(values + edges executed).
  bool offer(const std::vector<operation_id>& order) {
    const auto needs = measure_order(p_, order);
    if (needs.peak > budget_ || needs.seconds >= seconds_) return false;
    try {
      if (evaluate(p_, with_drops(p_, order)).peak > budget_) return false;
    } catch (const bad_schedule&) {  // computes a once-only operation again
      return false;
    }
    order_ = order;
    seconds_ = needs.seconds;
    return found_ = true;
  }
  /// The schedule, if there is one.
  void put_into(result& r) const {
    if (!found_) return;
    r.status = status::feasible;
    r.reason.clear();
    r.schedule = with_drops(p_, order_);
  }

 private:
  const problem& p_;
  bytes_t budget_;
  std::vector<operation_id> order_;
  double seconds_ = std::numeric_limits<double>::infinity();
  bool found_ = false;
};

}  // namespace remat
