// SPDX-License-Identifier: Apache-2.0
// Orders made of phases of last runs, and budgets that no phases fit.
#include <catch2/catch.hpp>

#include <random>

#include <remat/core/evaluate.hpp>
#include <remat/solver/order_in_phases.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

using namespace remat;
using namespace remat::testing;

TEST_CASE("order_in_phases makes a large target after the operation that needs its memory") {
  // The target s of 10 bytes is made from a. The target t is made from a too, by way of b of 20 bytes. Store-all has s beside a,
  // b and t.
  const problem p("p", {{"x", 1, true}, {"a", 4}, {"s", 10}, {"b", 20}, {"c", 1}, {"t", 10}},
                  {{"a", {0}, {1}, 1}, {"s", {1}, {2}, 1}, {"b", {1}, {3}, 1}, {"c", {3}, {4}, 1}, {"t", {4}, {5}, 1}}, {2, 5});
  CHECK(measure_order(p, needed_operations(p)).peak == 35);
  const auto order = order_in_phases(p, 25);
  REQUIRE(order);
  CHECK(evaluate(p, with_drops(p, *order)).peak == 25);
  CHECK_FALSE(order_in_phases(p, 24));
  CHECK_FALSE(order_in_phases(p, 25, [] { return true; }));
}

TEST_CASE("order_in_phases gives valid orders that fit, and budgets without phases are too small") {
  std::mt19937_64 g(12);
  int found = 0, possible = 0, impossible = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto p = random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 3, 7)),
                                      .once = round % 3 == 0 ? 25 : 0,
                                      .target = round % 2 == 0 ? 60 : 20});
    const auto least = bound::last_large_run_bound(p, bounds_without_search(p).budget);
    const auto budget = least + uniform(g, -2, 2);
    bound::last_run_cut cut(p);
    const auto [phases, needed] = bound::phases_of_last_runs(p, cut, budget);
    INFO("round " << round << ", " << budget << " bytes");
    REQUIRE(phases.empty() == (needed > budget));
    const bool fits = exhaustive_optimum(p, budget).has_value();
    possible += fits;
    if (phases.empty()) {
      ++impossible;
      REQUIRE_FALSE(exhaustive_optimum(p, needed - 1));
    }
    if (const auto order = order_in_phases(p, budget)) {
      ++found;
      REQUIRE(evaluate(p, with_drops(p, *order)).peak <= budget);
    }
  }
  CAPTURE(found, possible, impossible);
  CHECK(found > 100);
  CHECK(impossible > 100);
}
