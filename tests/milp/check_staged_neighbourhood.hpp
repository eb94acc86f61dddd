// SPDX-License-Identifier: Apache-2.0
/// @file
/// What `improve_staged` must do with any backend; each adapter's tests include this.
#pragma once

#include <catch2/catch.hpp>
#include <random>

#include <remat/core/solve.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/staged_neighbourhood.hpp>
#include <remat/testing/generators.hpp>

namespace remat::testing {

/// Some schedule within `budget`, mostly not the best.
inline incumbent poor_incumbent(const problem& p, bytes_t budget) {
  incumbent best(p, budget);
  best.offer(needed_operations(p));
  if (const auto order = eviction(p, needed_operations(p)).run(budget, {.distance = 0})) best.offer(*order);
  return best;
}

/// Random problems: windows of the whole model reach the optimum of the staged schedules in the order of the start.
template <milp::backend B>
void check_staged_neighbourhood(std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  int started = 0, improved = 0, optimal = 0, local = 0;
  for (int k = 0; k < count; ++k) {
    random_options o;
    o.operations = static_cast<std::size_t>(uniform(g, 5, 10));
    o.once = k % 3 == 0 ? 25 : 0;
    const auto p = k % 2 == 0 ? random_training_chain(g, 5) : random_problem(g, o);
    const auto low = bounds_without_search(p).budget, high = evaluate(p, with_drops(p, needed_operations(p))).peak - 1;
    if (low > high) continue;
    const auto budget = uniform(g, low, high);
    const auto start = poor_incumbent(p, budget);
    if (!start.found()) continue;
    ++started;
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    const auto run = [&](std::size_t columns) {
      auto best = start;
      monitor m({.seconds = milp::infinity, .seed = seed});
      improve_staged<B>(p, best, m, {.columns = columns, .window_seconds = milp::infinity, .patience = 20});
      REQUIRE(best.found());
      REQUIRE(best.seconds() <= start.seconds());
      const auto e = evaluate(p, with_drops(p, best.order()));
      REQUIRE(e.peak <= budget);
      REQUIRE(e.seconds == Approx(best.seconds()));
      return best;
    };
    const auto whole = run(100000), windows = run(1);
    CHECK(whole.order() == run(100000).order());
    CHECK(windows.order() == run(1).order());
    staging rules{.forward_in_one_stage = true, .recompute_where_used = true};
    rules.order = first_computations(p, with_drops(p, start.order()));
    rules.last_stage = true;
    const auto exact = solve(p, budget, checkmate<B>({.rules = rules, .restricted_first = false}), {.gap = 0});
    const auto least = std::min(exact.found() ? exact.seconds : milp::infinity, start.seconds());
    optimal += whole.seconds() <= least * (1 + 1e-6);
    local += windows.seconds() <= least * (1 + 1e-6);
    improved += whole.seconds() < start.seconds();
  }
  CAPTURE(started, improved, optimal, local);
  CHECK(improved > started / 4);
  CHECK(optimal > started * 9 / 10);
  CHECK(local > started / 2);

  const auto p = random_training_chain(g, 5);
  incumbent nothing(p, 0);
  monitor m;
  improve_staged<B>(p, nothing, m);
  CHECK(!nothing.found());
  CHECK_THROWS_AS(improve_staged<B>(p, nothing, m, {.columns = 0}), bad_option);
  CHECK_THROWS_AS(improve_staged<B>(p, nothing, m, {.window_seconds = 0}), bad_option);
  CHECK_THROWS_AS(improve_staged<B>(p, nothing, m, {.patience = 0}), bad_option);
}

}  // namespace remat::testing
