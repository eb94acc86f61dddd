// SPDX-License-Identifier: Apache-2.0
/// @file
/// The concept of a solver.
#pragma once

#include <concepts>
#include <string>

#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// A method that looks for the fastest schedule within a budget.
///
/// `s.solve(p, budget, m)` is `const`, re-entrant and polls `m.stopped()`. It returns a `result` with `status`, `schedule` and
/// the bounds that it proves (`bound`, `budget_bound`). `remat::solve` checks the result and fills in the rest. The
/// statuses without a schedule are:
/// - `infeasible`: proven for every schedule, not only for the schedules that the method searches;
/// - `not_found`: the method ended; `remat::solve` turns this into `time_limit` if the time was up;
/// - `not_applicable`: the method does not support this kind of problem, and `reason` says why.
/// @code
/// static_assert(remat::solver<remat::store_all>);
/// static_assert(!remat::solver<int>);
/// @endcode
template <class S>
concept solver = requires(const S& s, const problem& p, bytes_t budget, monitor& m) {
  { s.name() } -> std::convertible_to<std::string>;
  { s.solve(p, budget, m) } -> std::same_as<result>;
};

/// A solver that can begin with a known schedule: `s.with_start(x)` returns the same solver with `x` as its start. `x` may exceed
/// the budget.
/// @code
/// static_assert(remat::warm_startable<remat::improved<remat::store_all>> && !remat::warm_startable<remat::store_all>);
/// @endcode
template <class S>
concept warm_startable = solver<S> && requires(const S& s, const schedule& x) {
  { s.with_start(x) } -> std::same_as<S>;
};

/// True if `s` begins with the schedule that `with_start` gives it. A `warm_startable` solver may have a member `s.starts_warm()`
/// that denies this, such as `any_solver` with a solver inside that does not.
template <solver S>
bool starts_warm(const S& s) {
  if constexpr (requires { s.starts_warm(); })
    return s.starts_warm();
  else
    return warm_startable<S>;
}

/// True if `s` takes problems and schedules that are not plain, and plans for their tiers: it has a member `s.plans_tiers()` that
/// returns true. `solve` gives only plain problems to other solvers.
template <solver S>
bool plans_tiers(const S& s) {
  if constexpr (requires { s.plans_tiers(); })
    return s.plans_tiers();
  else
    return false;
}

}  // namespace remat
