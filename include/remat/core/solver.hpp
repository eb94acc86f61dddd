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

/// Is `p` a problem that `s` understands: a plain one, or any if it has a member `s.plans_tiers()` that says so? Others are not
/// given to it: `solve` answers `not_applicable`.
template <solver S>
bool understands(const S& s, const problem& p) {
  if constexpr (requires {
                  { s.plans_tiers() } -> std::same_as<bool>;
                })
    return p.plain() || s.plans_tiers();
  return p.plain();
}

}  // namespace remat
