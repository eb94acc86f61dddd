// SPDX-License-Identifier: Apache-2.0
/// @file
/// The curve of time against budget, in one call.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>

namespace remat {

/// A solver that shares work between budgets.
///
/// `s.sweep(p, budgets, m)` is `const`, re-entrant and polls `m.stopped()`. The budgets are distinct, in descending order, and at
/// least `bounds_without_search(p).budget`. `sweep` returns one result per budget, in the same order, as `s.solve` would. Without
/// work to share it returns an empty list; then each budget is solved by itself.
/// @code
/// static_assert(!remat::sweeping_solver<remat::store_all>);
/// @endcode
template <class S>
concept sweeping_solver = solver<S> && requires(const S& s, const problem& p, std::span<const bytes_t> budgets, monitor& m) {
  { s.sweep(p, budgets, m) } -> std::same_as<std::vector<result>>;
};

/// Anything callable with a `result`, returning nothing or a `control`.
template <class O>
concept point_observer = std::invocable<O&, const result&> &&
    (std::is_void_v<std::invoke_result_t<O&, const result&>> || std::same_as<std::invoke_result_t<O&, const result&>, control>);

/// An observer of a curve: of the progress of its searches, or of its points.
template <class O>
concept curve_observer = observer<O> || point_observer<O>;

/// A number of budgets at equal distances, such as `evenly{20}`: from the smallest budget for which a schedule is found to the
/// peak of store-all.
enum class evenly : std::size_t {};

namespace detail {

/// Transfers the bounds of `from`, which has a larger budget, to `to`.
inline void inherit(result& to, const result& from, double gap) {
  to.bound = std::max(to.bound, from.bound);
  to.budget_bound = std::max(to.budget_bound, from.budget_bound);
  if (!to.scope.empty() && to.scope == from.scope) to.scope_bound = std::max(to.scope_bound, from.scope_bound);
  if (to.found())
    to.status = to.gap() <= gap ? status::optimal : to.status;
  else if (to.budget < to.budget_bound)
    to.status = status::infeasible, to.reason.clear();
}

/// Makes a curve (by falling budget) consistent: a schedule counts for every budget that it fits, a bound on the time for every
/// smaller budget, a bound on the budget for all.
/// @throws broken_contract if a bound contradicts a schedule
inline void join_points(std::vector<result>& curve, const std::vector<result>& known, double gap) {
  auto all = known;
  all.insert(all.end(), curve.begin(), curve.end());
  constexpr auto unknown = std::numeric_limits<bytes_t>::max();
  bytes_t proven = 0, least = unknown;
  for (const auto& r : all) {
    proven = std::max(proven, r.budget_bound);
    least = std::min(least, r.smallest_budget.value_or(least));
  }
  if (proven > least)
    throw broken_contract(all[0].solver + ": proves that every budget is at least " + std::to_string(proven) + " bytes, but " +
                          std::to_string(least) + " are enough");
  for (std::size_t i = 0; i < curve.size(); ++i) {
    auto& r = curve[i];
    r.budget_bound = proven;
    if (least < unknown) r.smallest_budget = least;
    if (i > 0) inherit(r, curve[i - 1], gap);
    for (const auto& other : all) adopt(r, other, gap);
    if (r.found()) require_agreement(r, r);
  }
}

/// Computes the points of a curve.
/// @param budgets  in descending order, bytes
/// @param known    results for other budgets
/// @param on_point called with each point; may stop the search
template <solver S>
std::vector<result> solve_points(const problem& p, const std::vector<bytes_t>& budgets, const S& s, monitor& m,
                                 const std::vector<result>& known, const std::function<control(const result&)>& on_point) {
  const auto gap = m.limits().gap;
  const auto least = bounds_without_search(p).budget;
  std::vector<result> curve;
  bool stopped = false;
  const auto apply_known = [&](result& r) {
    if (!curve.empty()) inherit(r, curve.back(), gap);
    for (const auto* results : {&known, &std::as_const(curve)})
      for (const auto& other : *results) adopt(r, other, gap);
  };
  const auto add = [&](bytes_t budget, result answer) {
    auto r = judge(p, budget, s.name(), m, std::move(answer));
    apply_known(r);
    curve.push_back(std::move(r));
    stopped = on_point(curve.back()) == control::stop || stopped;
  };

  if constexpr (sweeping_solver<S>) {
    const auto end = std::find_if(budgets.begin(), budgets.end(), [&](bytes_t b) { return b < least; });
    std::vector<bytes_t> distinct;
    std::vector<std::size_t> slot;  // of each budget in `distinct`; all budgets above `max_peak` share one
    for (auto budget = budgets.begin(); budget != end; ++budget) {
      if (const auto largest = clamp_budget(*budget); distinct.empty() || distinct.back() != largest) distinct.push_back(largest);
      slot.push_back(distinct.size() - 1);
    }
    const auto answers = distinct.empty() || !(p.plain() || plans_tiers(s)) ? std::vector<result>{}
                                                                            : s.sweep(p, std::span<const bytes_t>(distinct), m);
    if (!answers.empty() && answers.size() != distinct.size())
      throw broken_contract(std::string(s.name()) + ": " + std::to_string(answers.size()) + " results for " +
                            std::to_string(distinct.size()) + " budgets");
    for (std::size_t i = 0; i < slot.size() && !answers.empty(); ++i) add(budgets[i], answers[slot[i]]);
  }
  for (auto i = curve.size(); i < budgets.size(); ++i) {
    result r;  // first, from the known results
    r.status = status::time_limit;
    r.budget = budgets[i];
    r.budget_bound = least;
    apply_known(r);
    if (budgets[i] < r.budget_bound) {
      r.status = status::infeasible;
    } else if (r.status != status::optimal && !m.stopped() && !stopped) {
      const auto share = m.limits_for_share(1 / static_cast<double>(budgets.size() - i));
      m.restart();
      const auto point = "point " + std::to_string(i + 1) + " of " + std::to_string(budgets.size()) + ": ";
      r = solve(p, budgets[i], s, share, report_to(m, point));
    }
    add(budgets[i], std::move(r));
  }
  join_points(curve, known, gap);
  return curve;
}

}  // namespace detail

/// Looks for the fastest schedule within each of several budgets: time against memory.
///
/// Points share their results: a schedule counts for every budget that it fits, a bound on the time for every smaller budget, a
/// bound on the budget for all. So the curve is monotone: a larger budget is never slower. A solver with `sweep` also shares its
/// own work between budgets.
/// @tparam S         the method
/// @tparam O         observers of progress, as in `solve`, or of points: callables on `const result&`
/// @param p          the problem
/// @param budgets    bytes for everything on the device, >= 0, in any order
/// @param s          the method
/// @param l          limits of the whole curve; budgets that are solved one by one share the remaining time equally
/// @param observers  called with the reports of the solver, or with each point once it is found, by falling budget (a smaller
///                   budget may still improve it); any may return `control::stop`
/// @return a result per distinct budget, by falling budget, judged as by `solve`; `elapsed` is the time since the call, s.
///         An infeasible point has the status `infeasible` and its `budget_bound`
/// @throws bad_option for a negative budget or limits out of range; what the solver throws; `broken_contract` if a schedule is
///         invalid or over its budget, or a bound is contradicted
/// Complexity: that of the solver, per budget or of its sweep, + O((values + edges executed) points).
/// @code
/// for (const auto& r : remat::pareto_curve(p, {1 << 28, 1 << 29, 1 << 30}, remat::min_cut{}))
///   if (r.found()) std::cout << r.budget << " bytes: " << r.seconds << " s\n";
/// @endcode
template <solver S, curve_observer... O>
std::vector<result> pareto_curve(const problem& p, std::vector<bytes_t> budgets, const S& s, const limits& l = {},
                                 O&&... observers) {
  l.validate();
  for (auto b : budgets) detail::require_budget(b);
  std::sort(budgets.begin(), budgets.end(), std::greater<>());
  budgets.erase(std::unique(budgets.begin(), budgets.end()), budgets.end());
  monitor m(l, [&](const progress& report) { return detail::notify(report, observers...); });
  return detail::solve_points(p, budgets, s, m, {}, [&](const result& r) { return detail::notify(r, observers...); });
}

/// As above, for budgets at equal distances. The search for the smallest budget takes a quarter of the time. If it finds nothing,
/// or the solver does not plan for the tiers of the problem, the smallest budget is that of `bounds_without_search`.
/// @throws bad_option for zero points, and as above
/// @code
/// const auto curve = remat::pareto_curve(p, remat::evenly{20}, remat::min_cut{}, {.seconds = 60});
/// @endcode
template <solver S, curve_observer... O>
std::vector<result> pareto_curve(const problem& p, evenly spacing, const S& s, const limits& l = {}, O&&... observers) {
  l.validate();
  const auto points = static_cast<std::size_t>(spacing);
  if (points < 1) throw bad_option("evenly must be >= 1 points, got 0");
  monitor m(l, [&](const progress& report) { return detail::notify(report, observers...); });
  const auto top = measure_order(p, needed_operations(p)).peak;
  std::vector<bytes_t> budgets = {top};
  std::vector<result> known;
  if (points > 1) {
    if (p.plain() || plans_tiers(s))
      if (auto smallest = smallest_budget(p, s, m.limits_for_share(0.25), 0.01, report_to(m)); smallest.found())
        known = {std::move(smallest)};
    const auto least = std::min(top, known.empty() ? bounds_without_search(p).budget : known[0].peak);
    const auto steps = static_cast<double>(points - 1);
    for (std::size_t i = 1; i < points; ++i) {
      const auto below = static_cast<double>(top - least) * static_cast<double>(i) / steps;
      budgets.push_back(top - static_cast<bytes_t>(below));
    }
    budgets.erase(std::unique(budgets.begin(), budgets.end()), budgets.end());
  }
  return detail::solve_points(p, budgets, s, m, std::move(known),
                              [&](const result& r) { return detail::notify(r, observers...); });
}

/// Corrects the bounds and proofs of a curve, if schedules may need less memory than `evaluate` says. An example are operations
/// that write over their inputs, in a problem that cannot say so. What is proven for a budget then holds for budgets smaller by
/// `less`.
/// @param p     the problem
/// @param curve a result per budget, by falling budget
/// @param less  most bytes by which a schedule may need less, >= 0
/// @param gap   distance to the bound up to which a schedule counts as optimal, as in `limits`
/// Complexity: O(points) after `bounds_without_search`.
/// @code
/// auto curve = remat::pareto_curve(p, remat::evenly{20}, remat::min_cut{});
/// remat::correct_bounds(p, curve, remat::bytes_t{1} << 20, 0.01);  // an operation writes over 1 MiB of its inputs
/// @endcode
inline void correct_bounds(const problem& p, std::vector<result>& curve, bytes_t less, double gap) {
  if (less == 0) return;
  const auto least = bounds_without_search(p).seconds;
  auto larger = curve.size();  // number of points whose budgets are larger by `less` or more
  for (auto i = curve.size(); i-- > 0;) {
    auto& r = curve[i];
    larger = std::min(larger, i);
    while (larger > 0 && curve[larger - 1].budget - r.budget < less) --larger;
    r.bound = larger > 0 ? curve[larger - 1].bound : least;
    r.scope_bound = larger > 0 ? curve[larger - 1].scope_bound : std::min(least, r.scope_bound);
    r.budget_bound = std::max<bytes_t>(0, r.budget_bound - less);
    if (r.status == status::optimal && r.gap() > gap) r.status = status::feasible;
    if (r.status == status::infeasible && r.budget >= r.budget_bound) r.status = status::not_found;
  }
}

}  // namespace remat
