// SPDX-License-Identifier: Apache-2.0
/// @file
/// The one call: a graph, its costs, a budget and a solver in; a judged schedule out.
#pragma once

#include <concepts>
#include <string>
#include <type_traits>
#include <utility>

#include <remat/core/evaluate.hpp>
#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>

namespace remat {

/// A method that looks for the fastest schedule within a budget.
///
/// `s.solve(p, budget, m)` is `const`, re-entrant and polls `m.stopped()`. It returns a `result` with `status`, `schedule`, and,
/// where it proves one, `bound` and `budget_bound`; `solve` fills in and checks the rest. `infeasible` is returned only if proven
/// for every schedule, not just for those the method searches.
/// @code
/// static_assert(remat::solver<remat::store_all>);
/// static_assert(!remat::solver<int>);
/// @endcode
template <class S>
concept solver = requires(const S& s, const problem& p, bytes_t budget, monitor& m) {
  { s.name() } -> std::convertible_to<std::string>;
  { s.solve(p, budget, m) } -> std::same_as<result>;
};

/// Lower bounds that hold for every schedule of `p` and need no search.
struct trivial_bounds {
  double seconds = 0;  ///< sum of the costs of the operations that targets depend on, s
  bytes_t budget = 0;  ///< largest of: sources; held + targets; held + inputs + outputs + workspace of a needed operation
};

/// Computes `trivial_bounds` in O(values + edges).
inline trivial_bounds bounds_without_search(const problem& p) {
  const auto& values = p.values();
  const auto droppable = [&](index_t v) { return values[v].held ? 0 : values[v].bytes; };
  trivial_bounds b;
  bytes_t end = p.held_bytes();
  for (auto v : p.targets()) end += droppable(v);
  b.budget = std::max(p.source_bytes(), end);
  for (auto o : needed_operations(p)) {
    const auto& op = p.operations()[o];
    b.seconds += op.seconds;
    bytes_t here = p.held_bytes() + op.workspace;
    for (auto v : op.outputs) here += values[v].bytes;
    for (auto v : op.inputs) here += droppable(v);
    b.budget = std::max(b.budget, here);
  }
  return b;
}

/// Looks for the fastest schedule of `p` within `budget`.
/// @tparam S         the method
/// @tparam O         observers, called in the order given, at each report of the solver
/// @param p          the problem
/// @param budget     bytes for everything on the device, held sources included; >= 0
/// @param s          the method
/// @param l          limits of the search
/// @param observers  callables on `const progress&`; any may return `control::stop`
/// @return the schedule and what is known of it; every number of the schedule comes from `evaluate`
/// @throws bad_option for a negative budget or limits out of range; what the solver throws; `broken_contract` if its schedule is
///         invalid or over the budget
/// Complexity: that of the solver, + O(values + edges executed) for the evaluation.
/// @code
/// auto r = remat::solve(p, 1 << 30, remat::rotor{}, {.seconds = 10});
/// if (r.found()) run(r.schedule);
/// @endcode
template <solver S, observer... O>
result solve(const problem& p, bytes_t budget, const S& s, const limits& l = {}, O&&... observers) {
  if (budget < 0) throw bad_option("budget must be >= 0 bytes, got " + std::to_string(budget));
  l.validate();
  auto notify = [&](const progress& now) {
    auto answer = control::go_on;
    [[maybe_unused]] auto tell = [&](auto& o) {
      if constexpr (std::is_void_v<std::invoke_result_t<decltype(o), const progress&>>)
        o(now);
      else if (o(now) == control::stop)
        answer = control::stop;
    };
    (tell(observers), ...);
    return answer;
  };
  monitor m(l, notify);
  const auto least = bounds_without_search(p);
  result r;
  if (budget < least.budget)
    r.status = status::infeasible;
  else
    r = s.solve(p, budget, m);
  r.solver = s.name();
  r.budget = budget;
  r.bound = std::max(r.bound, least.seconds);
  if (!r.scope.empty()) r.scope_bound = std::max(r.scope_bound, r.bound);
  r.budget_bound = std::max(r.budget_bound, least.budget);
  if (r.found()) {
    try {
      const auto e = evaluate(p, r.schedule);
      if (e.peak > budget)
        throw broken_contract(r.solver + ": schedule needs " + std::to_string(e.peak) + " bytes, budget " +
                              std::to_string(budget));
      r.peak = e.peak;
      r.seconds = e.seconds;
      r.recomputed = e.recomputed;
    } catch (const bad_schedule& why) {
      throw broken_contract(r.solver + ": invalid schedule, " + why.what());
    }
    r.smallest_budget = std::min(r.peak, r.smallest_budget.value_or(r.peak));
    if (r.gap() <= l.gap) r.status = status::optimal;
  } else {
    r.schedule = {};
    if (r.status == status::infeasible) r.budget_bound = std::max(r.budget_bound, budget + 1);
  }
  r.elapsed = m.elapsed();
  return r;
}

}  // namespace remat
