// SPDX-License-Identifier: Apache-2.0
/// @file
/// The main call: solves a problem within a budget by a given method, and judges the schedule.
#pragma once

#include <concepts>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solver.hpp>
#include <remat/core/text.hpp>

namespace remat {

namespace detail {

/// Calls each observer that accepts an `Event`, in the order given.
/// @return stop if any observer returns stop
template <class Event, class... O>
control notify(const Event& event, O&... observers) {
  auto answer = control::go_on;
  [[maybe_unused]] const auto notify_one = [&](auto& o) {
    if constexpr (std::invocable<decltype(o), const Event&>) {
      if constexpr (std::is_void_v<std::invoke_result_t<decltype(o), const Event&>>)
        o(event);
      else if (o(event) == control::stop)
        answer = control::stop;
    }
  };
  (notify_one(observers), ...);
  return answer;
}

/// Evaluates the schedule of a report, and fills in its time and peak: observers see checked schedules only.
/// @throws broken_contract if the schedule is invalid or over the budget
inline progress judged(const problem& p, bytes_t budget, const std::string& solver, progress report) {
  if (!report.schedule) return report;
  try {
    const auto e = evaluate(p, *report.schedule);
    if (e.peak <= budget) {
      report.best = e.seconds;
      report.peak = e.peak;
      return report;
    }
    throw broken_contract(solver + ": reports a schedule of " + std::to_string(e.peak) + " bytes, budget " +
                          std::to_string(budget));
  } catch (const bad_schedule& why) {
    throw broken_contract(solver + ": reports an invalid schedule, " + why.what());
  }
}

/// The result for a problem that the solver named `solver` does not support.
inline result beyond_solver(const problem& p, const std::string& solver) {
  return refused(solver + " plans for a device and copies to a host; the problem has " + p.beyond_plain());
}

/// Checks the bounds of `proven` against a schedule. Sums of seconds are rounded: a bound may exceed the time by a relative 1e-9.
/// @param proven a result with bounds
/// @param known  a result with a schedule
/// @throws broken_contract if a bound contradicts the schedule
inline void require_agreement(const result& proven, const result& known) {
  if (known.peak < proven.budget_bound)
    throw broken_contract(proven.solver + ": proves that every budget is at least " + std::to_string(proven.budget_bound) +
                          " bytes, but " + std::to_string(known.peak) + " are enough");
  if (known.peak <= proven.budget && proven.bound > known.seconds * (1 + 1e-9))
    throw broken_contract(proven.solver + ": proves that every schedule within " + std::to_string(proven.budget) +
                          " bytes takes at least " + printed("%.10g s, but one takes ", proven.bound) +
                          printed("%.10g s", known.seconds));
}

inline void require_budget(bytes_t budget) {
  if (budget < 0) throw bad_option("budget must be >= 0 bytes, got " + std::to_string(budget));
}

}  // namespace detail

/// Turns a given schedule into a result: feasible, with its peaks and time from `evaluate`.
/// @throws bad_schedule if it is invalid
/// Complexity: that of `evaluate`.
inline result as_result(const problem& p, const schedule& s) {
  result r;
  r.status = status::feasible;
  r.schedule = s;
  detail::set_costs(r, evaluate(p, s));
  return r;
}

/// Judges the answer of a solver: evaluates its schedule anew, and checks its bounds against the schedule.
/// @param p      the problem
/// @param budget budget of the search, bytes
/// @param solver name of the solver
/// @param m      monitor of the search; `limits.gap` decides whether the schedule counts as optimal
/// @param r      the answer
/// @return the answer with peak and time from `evaluate`, bounds at least those of `bounds_without_search`, and elapsed time.
///         `not_found` without a reason becomes `time_limit` if the solver was stopped, because it did not end by itself
/// @throws broken_contract if the schedule is invalid or over the budget, or contradicts a bound
/// Complexity: O(values + edges executed).
inline result judge(const problem& p, bytes_t budget, const std::string& solver, const monitor& m, result r) {
  const auto least = bounds_without_search(p);
  r.solver = solver;
  r.budget = budget;
  r.elapsed = m.elapsed();
  if (r.status == status::not_found && r.reason.empty() && m.stopped()) r.status = status::time_limit;
  r.bound = std::max(r.bound, least.seconds);
  if (!r.scope.empty()) r.scope_bound = std::max(r.scope_bound, r.bound);
  r.budget_bound = std::max(r.budget_bound, least.budget);
  if (r.found()) {
    try {
      const auto e = evaluate(p, r.schedule);
      if (e.peak > budget)
        throw broken_contract(solver + ": schedule needs " + std::to_string(e.peak) + " bytes, budget " + std::to_string(budget));
      detail::set_costs(r, e);
    } catch (const bad_schedule& why) {
      throw broken_contract(solver + ": invalid schedule, " + why.what());
    }
    detail::require_agreement(r, r);
    r.smallest_budget = std::min(r.peak, r.smallest_budget.value_or(r.peak));
    if (r.gap() <= m.limits().gap) r.status = status::optimal;
  } else {
    r.schedule = {};
    if (r.status == status::infeasible)
      r.budget_bound = std::max(r.budget_bound, budget < std::numeric_limits<bytes_t>::max() ? budget + 1 : budget);
  }
  return r;
}

/// Looks for the fastest schedule of `p` within `budget`.
/// @tparam S         the method
/// @tparam O         observers, called in the order given, at each report of the solver
/// @param p          the problem
/// @param budget     bytes for everything on the device, held sources included; >= 0
/// @param s          the method
/// @param l          limits of the search
/// @param observers  callables on `const progress&`; any may return `control::stop`
/// @return the schedule with its costs and bounds; all costs come from `evaluate`; `not_applicable` for a problem that the solver
///         does not support
/// @throws bad_option for a negative budget or limits out of range; what the solver throws; `broken_contract` if its schedule is
///         invalid or over the budget, or contradicts its bounds
/// Complexity: that of the solver, + O(values + edges executed) for the evaluation.
/// @code
/// auto r = remat::solve(p, 1 << 30, remat::rotor{}, {.seconds = 10});
/// if (r.found()) run(r.schedule);
/// @endcode
template <solver S, observer... O>
result solve(const problem& p, bytes_t budget, const S& s, const limits& l = {}, O&&... observers) {
  detail::require_budget(budget);
  l.validate();
  monitor m(l, [&](const progress& report) {
    if constexpr (sizeof...(O) == 0) return control::go_on;
    return detail::notify(detail::judged(p, budget, s.name(), report), observers...);
  });
  result answer;
  if (budget < bounds_without_search(p).budget)
    answer.status = status::infeasible;
  else if (!p.plain() && !plans_tiers(s))
    answer = detail::beyond_solver(p, s.name());
  else
    answer = s.solve(p, clamp_budget(budget), m);
  return judge(p, budget, s.name(), m, std::move(answer));
}

/// Solves one budget of a sweep, for solvers that share work between budgets. The result is completed and judged as by `solve`.
/// @param p      the problem
/// @param budget budget of this slice, bytes
/// @param name   name of the solver
/// @param m      monitor of the whole sweep
/// @param left   number of slices left, this one included; `search` gets 1 / `left` of the remaining time
/// @param search search of the solver for this budget
/// @return the judged result
/// @throws as `solve`
template <std::invocable<monitor&> Search>
result budget_slice(const problem& p, bytes_t budget, const std::string& name, monitor& m, double left, const Search& search) {
  detail::require_budget(budget);
  m.restart();
  monitor part(m, 1 / left,
               [&, tell = report_to(m)](const progress& report) { return tell(detail::judged(p, budget, name, report)); });
  result answer;
  if (budget < bounds_without_search(p).budget)
    answer.status = status::infeasible;
  else
    answer = search(part);
  return judge(p, budget, name, part, std::move(answer));
}

/// A known schedule with which a search begins. The schedule must outlive this object.
struct start_from {
  explicit start_from(const remat::schedule& s) : schedule(s) {}
  const remat::schedule& schedule;
};

/// As above, from a known schedule, such as the last answer for other costs or another budget. A `warm_startable` solver begins
/// with it. If the known schedule fits the budget, the answer is not slower.
/// @param start a valid schedule of `p`, of any peak
/// @throws bad_schedule if `start` is not valid for `p`
/// @code
/// const auto later = remat::solve(p.with_costs(times), budget, method, remat::start_from(plan.schedule), {.seconds = 5});
/// @endcode
template <solver S, observer... O>
result solve(const problem& p, bytes_t budget, const S& s, const start_from& start, const limits& l = {}, O&&... observers) {
  const auto known = as_result(p, start.schedule);
  result r;
  if constexpr (warm_startable<S>)
    r = solve(p, budget, start.schedule.plain() || plans_tiers(s) ? s.with_start(start.schedule) : s, l,
              std::forward<O>(observers)...);
  else
    r = solve(p, budget, s, l, std::forward<O>(observers)...);
  detail::require_agreement(r, known);
  detail::adopt(r, known, l.gap);
  return r;
}

}  // namespace remat
