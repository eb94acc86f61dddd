// SPDX-License-Identifier: Apache-2.0
/// @file
/// Search for the smallest budget.
#pragma once

#include <algorithm>
#include <string>

#include <remat/core/solve.hpp>

namespace remat {

/// Looks for the smallest budget for which a solver finds a schedule, by bisection. A `warm_startable` solver begins each search
/// with the last schedule found, and then lowers the budget further in small steps.
///
/// The answer is an upper bound on the smallest feasible budget. A solver that is not exact may miss schedules; it may also fail
/// for a budget above the answer.
/// @tparam S        the method
/// @tparam O        observers, as of `solve`
/// @param p         the problem
/// @param s         the method
/// @param l         limits of the whole search; each of its solves gets a share of the time
/// @param tolerance relative precision of the budget, at which bisection and small steps end; in (0, 1)
/// @param observers callables on `const progress&`; any may return `control::stop`
/// @return the schedule with the smallest peak found, at worst store-all; `budget` and `smallest_budget` are its peak,
///         `budget_bound` is proven. If the problem is not plain, and the solver finds no schedule even within the peak of
///         store-all: the answer for that budget
/// @throws bad_option for limits or a tolerance out of range; broken_contract for a bound that a known schedule contradicts; and
///         what the solver throws
/// Complexity: O(log(1 / tolerance)) calls of the solver, and one call for each small step that succeeds.
/// @code
/// const auto least = remat::smallest_budget(p, remat::rotor{}, {.seconds = 10});
/// std::cout << "between " << least.budget_bound << " and " << least.peak << " bytes\n";
/// @endcode
template <solver S, observer... O>
result smallest_budget(const problem& p, const S& s, const limits& l = {}, double tolerance = 0.01, O&&... observers) {
  if (!(tolerance > 0 && tolerance < 1)) throw bad_option("tolerance must be in (0, 1), got " + std::to_string(tolerance));
  l.validate();
  monitor m(l, [&](const progress& report) { return detail::notify(report, observers...); });
  result best;
  if (p.plain()) {
    best = as_result(p, with_drops(p, needed_operations(p)));
  } else {
    auto share = m.limits_for_share(0.5);
    share.gap = 0.99;
    best = solve(p, std::max(measure_store_all(p).peak, bounds_without_search(p).budget), s, share,
                 report_to(m, "smallest budget, a first schedule: "));
    if (!best.found()) return best;
  }
  auto proven = bounds_without_search(p).budget;
  const auto look = [&](bytes_t budget) {
    auto share = m.limits_for_share(0.25);
    share.gap = 0.99;  // any schedule will do
    m.restart();
    const auto r = solve(p, budget, s, start_from(best.schedule), share,
                         report_to(m, "smallest budget, " + std::to_string(budget) + " bytes: "));
    proven = std::max(proven, r.budget_bound);
    if (best.peak < proven) detail::require_agreement(r, best);
    if (r.found()) best = r;
    return r.found();
  };
  const auto part = [&](double x) { return static_cast<bytes_t>(x * static_cast<double>(best.peak)); };
  for (auto low = proven; !m.stopped() && best.peak - low >= std::max<bytes_t>(1, part(tolerance));) {
    const auto budget = low + (best.peak - low) / 2;
    if (!look(budget)) low = std::max(budget + 1, proven);  // no schedule was found below `low`
  }
  if (starts_warm(s))  // a nearby start may succeed where a distant start failed
    for (double step = 0.02; step >= tolerance && best.peak > proven && !m.stopped();)
      if (!look(std::max(proven, std::min(best.peak - 1, part(1 - step))))) step /= 2;
  best.status = status::feasible;
  best.solver = s.name();
  best.budget = best.peak;
  best.smallest_budget = best.peak;
  best.bound = bounds_without_search(p).seconds;
  best.budget_bound = proven;
  detail::require_agreement(best, best);
  best.elapsed = m.elapsed();
  return best;
}

}  // namespace remat
