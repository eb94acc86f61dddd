// SPDX-License-Identifier: Apache-2.0
/// @file
/// One level of a hierarchy: a graph in parts with known options, and the concept of a joiner.
#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/structure/partition.hpp>

namespace remat::hierarchy {

/// A problem in parts with their options, and the schedules found for it.
class level {
 public:
  /// @param problem        the problem
  /// @param numbering      index of the parts
  /// @param list           the parts, disjoint
  /// @param choices        the options of each part
  /// @param best           receives the fastest schedule that fits
  /// @param is_whole       true for the problem of the caller; false for a part of that problem
  /// @param on_improvement called when a schedule is the fastest so far
  level(const remat::problem& problem, const part_index& numbering, const structure::partition& list,
        const std::vector<part_options>& choices, incumbent& best, bool is_whole, std::function<void()> on_improvement = {})
      : p(problem),
        index(numbering),
        parts(list),
        options(choices),
        whole_problem(is_whole),
        best_(best),
        on_improvement_(std::move(on_improvement)) {}

  const problem& p;
  const part_index& index;
  const structure::partition& parts;
  const std::vector<part_options>& options;
  const bool whole_problem;

  bytes_t budget() const { return best_.budget(); }
  /// Time of the fastest schedule so far, s; infinity before the first.
  double seconds() const { return best_.seconds(); }
  /// Offers an order of `p`.
  /// @return true if it fits and is the fastest so far
  /// Complexity: O(values + edges executed).
  bool offer(std::vector<operation_id> order) {
    const auto needs = measure_order(p, order);
    const bool better = best_.offer(order);
    if (better && on_improvement_) on_improvement_();
    if (needs.peak <= budget()) fitting_orders_.emplace_back(needs.seconds, std::move(order));
    return better;
  }
  /// Orders that fit the budget, each with its seconds.
  std::vector<std::pair<double, std::vector<operation_id>>>& fitting() { return fitting_orders_; }

 private:
  incumbent& best_;
  std::function<void()> on_improvement_;
  std::vector<std::pair<double, std::vector<operation_id>>> fitting_orders_;
};

/// A method that joins the options of parts to schedules. `j.join(l, m)` is `const` and re-entrant, polls `m.stopped()`, and
/// offers its orders to `l.offer`.
/// @code
/// static_assert(remat::hierarchy::joiner<remat::join_by_chain>);
/// @endcode
template <class J>
concept joiner = requires(const J& j, level& l, monitor& m) {
  { j.name() } -> std::convertible_to<std::string>;
  j.join(l, m);
};

}  // namespace remat::hierarchy
