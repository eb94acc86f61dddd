// SPDX-License-Identifier: Apache-2.0
/// @file
/// Conformance suite for solvers: run it on your solver before you trust its schedules.
#pragma once

#include <cmath>
#include <cstddef>
#include <exception>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>
#include <remat/testing/tier_oracle.hpp>

namespace remat::testing {

/// Options of `check_solver`.
struct solver_suite {
  std::size_t rounds = 500;  ///< random problems, each with three budgets
  std::uint64_t seed = 1;    ///< seed of the random problems
  bool exact = false;        ///< require the optimum of every problem without copies; otherwise any valid answer will do
  bool once = true;          ///< include problems with once-only operations and sources that are not held
  bool copies = true;        ///< include problems that allow copies to the host, whether the solver uses copies or not
  double patience = 5;       ///< longest time in which the solver must notice a limit or a stop, s; generous for busy machines
};

namespace detail {

/// A chain of three operations and its backward, with three values live in the middle.
/// @param seconds time of each operation, s
inline problem extreme(std::string name, double seconds, const std::optional<copy_rates>& copies) {
  std::vector<value> values;
  for (const auto* v : {"a", "b", "c", "d", "e", "f"}) values.push_back({v, 3});
  const auto op = [&](std::vector<value_id> inputs, value_id output) {
    return operation{"o", std::move(inputs), {output}, seconds};
  };
  return problem(std::move(name), std::move(values),
                 {op({}, 0), op({0}, 1), op({1}, 2), op({2}, 3), op({1, 3}, 4), op({0, 4}, 5)}, {5}, copies);
}

/// Small named problems at the limits of validity.
inline std::vector<problem> edge_problems() {
  const std::vector<value> two = {{"a", 3}, {"b", 2}};
  const auto op = [](std::vector<value_id> inputs, std::vector<value_id> outputs, double seconds, bytes_t workspace = 0,
                     bool once = false) {
    return operation{"o", std::move(inputs), std::move(outputs), seconds, workspace, once};
  };
  return {
      problem("nothing", {}, {}, {}),
      problem("sources only", {{"held", 4, true}, {"other", 2}}, {}, {1}),
      problem("no targets", two, {op({}, {0}, 1), op({0}, {1}, 1)}, {}),
      problem("one operation", {{"a", 3}}, {op({}, {0}, 1, 2)}, {0}),
      problem("an operation without outputs", two, {op({}, {0}, 1), op({0}, {}, 5), op({0}, {1}, 1)}, {1}),
      problem("no bytes", {{"a", 0}, {"b", 0}, {"c", 0}}, {op({}, {0}, 1), op({0}, {1}, 1), op({0, 1}, {2}, 1)}, {2}),
      problem("no costs", {{"a", 3}, {"b", 2}, {"c", 4}}, {op({}, {0}, 0), op({0}, {1}, 0), op({0, 1}, {2}, 0)}, {0, 2}),
      problem("all held", {{"a", 3, true}, {"b", 2}}, {op({0}, {1}, 1)}, {0, 1}),
      problem("once everywhere", {{"a", 3}, {"b", 2}, {"c", 4}},
              {op({}, {0}, 1, 0, true), op({0}, {1}, 1, 0, true), op({0, 1}, {2}, 1, 0, true)}, {2}),
      problem("a source to be dropped", {{"s", 5}, {"a", 3}, {"b", 5}}, {op({0}, {1}, 1), op({1}, {2}, 1)}, {2}),
      problem("copies", {{"a", 3}, {"b", 2}, {"c", 4}}, {op({}, {0}, 1), op({0}, {1}, 1), op({0, 1}, {2}, 1)}, {2},
              copy_rates{1e9, 1e9, 1e-6}),
      problem("large numbers", {{"a", max_bytes / 4}, {"b", max_bytes / 4}, {"c", 1}},
              {op({}, {0}, 1e9), op({0}, {1}, 1e-9), op({0, 1}, {2}, 1)}, {2}),
      extreme("costs beyond division", std::numeric_limits<double>::denorm_min(), std::nullopt),
      extreme("costs near the range of doubles", 1e306, std::nullopt),
      extreme("copies in no time", 1, copy_rates{1e300, 1e300, 0}),
  };
}

}  // namespace detail

/// Runs a solver on problems with a known optimum, and checks that
/// - schedules are valid, within the budget and not faster than the optimum;
/// - claims (`optimal`, `infeasible`, `time_limit`, bounds) are true;
/// - schedules are no slower than store-all, if store-all fits;
/// - equal calls give equal answers, also from two threads at once;
/// - the solver obeys limits and observers.
/// The small problems have no time limit, so the solver must end by itself.
/// @tparam S the solver
/// @param s  the solver
/// @param o  options
/// @return one line per failure; empty if the solver conforms
/// Complexity: 3 `rounds` calls of the solver and of an exhaustive search, on at most a dozen operations each.
/// @code
/// for (const auto& failure : remat::testing::check_solver(my_solver{})) std::cerr << failure << '\n';
/// @endcode
template <solver S>
std::vector<std::string> check_solver(const S& s, const solver_suite& o = {}) {
  std::vector<std::string> failures;
  const limits unlimited{.seconds = std::numeric_limits<double>::infinity(), .seed = 7, .gap = 0};
  const auto check = [&](const problem& p, bytes_t budget, const std::string& what) {
    const auto expect = [&](bool ok, const std::string& failure) {
      if (!ok) failures.push_back(std::string(s.name()) + ", " + what + ", budget " + std::to_string(budget) + ": " + failure);
      return ok;
    };
    result r;
    try {
      r = solve(p, budget, s, unlimited);
    } catch (const std::exception& why) {
      expect(false, why.what());
      return;
    }
    const double never = std::numeric_limits<double>::infinity();
    std::optional<double> known;
    if (!p.copies())
      known = exhaustive_optimum(p, budget).value_or(never);
    else if (const auto best = exhaustive_optimum_on_tiers(p, budget, 4'000))
      known = best->seconds;
    const double optimum = known.value_or(never);
    const double slack = p.copies() ? 1e-5 : 1e-9 * p.total_seconds();
    if (std::isfinite(optimum)) {
      expect(r.status != status::infeasible, "infeasible, but it is not");
      expect(r.budget_bound <= budget, "a bound on the budget that is too high: " + std::to_string(r.budget_bound));
      expect(r.bound <= optimum + slack, "bound " + std::to_string(r.bound) + " above the optimum " + std::to_string(optimum));
      if (r.status == status::optimal) expect(r.seconds <= optimum + slack, "not optimal, but says so");
      if (o.exact && !p.copies() && expect(r.found(), "no schedule")) expect(r.seconds <= optimum + slack, "not the optimum");
    }
    expect(r.status != status::time_limit, "time_limit, but there is no limit");
    expect(r.status != status::not_applicable || !r.reason.empty(), "not_applicable, but no reason");
    if (r.found() && known) expect(r.seconds >= optimum - slack, "faster than the optimum: the judge is wrong");
    if (budget >= evaluate(p, with_drops(p, needed_operations(p))).peak && expect(r.found(), "store-all fits, and is not found"))
      expect(r.seconds <= bounds_without_search(p).seconds + slack, "slower than store-all, which fits");
    if (r.smallest_budget)
      expect(p.copies() ? *r.smallest_budget >= bounds_without_search(p).budget
                        : exhaustive_optimum(p, *r.smallest_budget).has_value(),
             "smallest budget without a schedule");
    expect(std::isfinite(r.bound) && !std::isnan(r.scope_bound), "a bound that is no number");
    result again[2];
    std::thread other([&] { again[0] = solve(p, budget, s, unlimited); });
    again[1] = solve(p, budget, s, unlimited);
    other.join();
    for (const auto& a : again)
      expect(a.schedule == r.schedule && a.status == r.status && a.bound == r.bound, "another answer to the same call");
  };

  for (const auto& p : detail::edge_problems()) {
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    for (const auto budget : {bytes_t{0}, all / 2, all - 1, all, all + 1, max_bytes})
      if (budget >= 0) check(p, budget, p.name());
  }
  std::mt19937_64 g(o.seed);
  for (std::size_t round = 0; round < o.rounds; ++round) {
    random_options r;
    r.operations = static_cast<std::size_t>(uniform(g, 2, 8));
    r.sources = static_cast<std::size_t>(uniform(g, 1, 2));
    r.outputs = round % 3 == 0 ? 1 : 2;
    r.held = o.once ? 50 : 100;
    r.once = o.once && round % 2 == 0 ? 20 : 0;
    r.density = static_cast<int>(uniform(g, 20, 70));
    const bool chain = round % 5 == 4, copies = o.copies && round % 4 == 1;
    const auto length = static_cast<std::size_t>(uniform(g, 1, copies ? 1 : 3));
    if (copies) r.operations = 2 + r.operations / 3, r.sources = 1, r.outputs = 1;
    auto p = chain ? random_training_chain(g, length) : random_problem(g, r);
    const auto rate = [&] { return 0.5 * static_cast<double>(uniform(g, 1, 16)); };
    auto values = p.values();
    for (std::size_t v = 0; v < values.size(); ++v) values[v].movable = round % 8 != 1 || v % 3 != 1;
    if (copies) p = problem(p.name(), std::move(values), p.operations(), p.targets(), copy_rates{rate(), rate(), 0.5});
    const auto all = evaluate(p, store_all_schedule(p)).peak, least = bounds_without_search(p).budget;
    for (const auto budget : {least, least + (all - least) / 2, all - 1})
      if (budget >= 0) check(p, budget, (chain ? "chain " : "random problem ") + std::to_string(round));
  }

  const auto large = transformer_training_graph(12);
  const auto peak = evaluate(large, store_all_schedule(large)).peak;
  for (const bool observed : {false, true}) {
    bool observer_called = false;
    const limits l{.seconds = observed ? 20.0 : 0.0};
    const auto r = solve(large, large.held_bytes() + (peak - large.held_bytes()) / 2, s, l, [&](const progress&) {
      observer_called = true;
      return observed ? control::stop : control::go_on;
    });
    if (r.elapsed > o.patience + (observer_called ? 0 : l.seconds))  // a solver that reports nothing has its time
      failures.push_back(std::string(s.name()) + (observed ? ": stopped by an observer" : ": without time") + ", it took " +
                         std::to_string(r.elapsed) + " s");
  }
  return failures;
}

}  // namespace remat::testing
