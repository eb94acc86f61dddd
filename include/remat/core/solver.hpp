// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a solver is.
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
/// `s.solve(p, budget, m)` is `const`, re-entrant and polls `m.stopped()`. It returns a `result` with `status`, `schedule`, and,
/// where it proves one, `bound` and `budget_bound`; `solve` fills in and checks the rest. `infeasible` is returned only if proven
/// for every schedule, not just for those the method searches; a method that came to its end without a schedule leaves the status
/// `not_found`, which `solve` turns into `time_limit` where time was up, and one that is for other problems says
/// `not_applicable`, with a `reason`.
/// @code
/// static_assert(remat::solver<remat::store_all>);
/// static_assert(!remat::solver<int>);
/// @endcode
template <class S>
concept solver = requires(const S& s, const problem& p, bytes_t budget, monitor& m) {
  { s.name() } -> std::convertible_to<std::string>;
  { s.solve(p, budget, m) } -> std::same_as<result>;
};

/// A solver that can begin with a schedule: `s.with_start(x)` is the same solver, told of `x`, which may need more than the
/// budget.
/// @code
/// static_assert(remat::warm_startable<remat::improved<remat::store_all>> && !remat::warm_startable<remat::store_all>);
/// @endcode
template <class S>
concept warm_startable = solver<S> && requires(const S& s, const schedule& x) {
  { s.with_start(x) } -> std::same_as<S>;
};

/// Does `s` take problems and schedules that are not plain, and plan for their tiers? It does if it has a member
/// `s.plans_tiers()` that says so; to others `solve` does not give any.
template <solver S>
bool plans_tiers(const S& s) {
  if constexpr (requires { s.plans_tiers(); })
    return s.plans_tiers();
  else
    return false;
}

}  // namespace remat
