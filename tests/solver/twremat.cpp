// SPDX-License-Identifier: Apache-2.0
// Recursive schedules from separators.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/twremat.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../pebbles.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<twremat>);

namespace {

/// Each node reads up to `inputs` of the `reach` preceding nodes.
problem banded(std::mt19937_64& g, index_t n, index_t reach, int inputs) {
  std::vector<std::vector<value_id>> operands(n);
  for (index_t i = 1; i < n; ++i) {
    operands[i].push_back(i - 1);
    for (int k = 1; k < inputs; ++k) operands[i].push_back(i - static_cast<index_t>(uniform(g, 1, std::min(i, reach))));
  }
  return pebbles(operands);
}

}  // namespace

TEST_CASE("order_by_separators down to single operations needs memory for width times logarithm operations") {
  std::mt19937_64 g(52);
  int recomputed = 0;
  for (int round = 0; round < 300; ++round) {
    const auto n = static_cast<index_t>(uniform(g, 10, 120));
    const auto reach = static_cast<index_t>(uniform(g, 1, 4));
    const auto p = round % 5 == 0 ? unit_training_chain(n) : banded(g, n, reach, 2);
    const auto needed = needed_operations(p);
    const structure::separator_tree tree(p, needed);
    const auto order = order_by_separators(p, tree, 1, 10'000'000);
    REQUIRE(order);
    evaluate(p, with_drops(p, *order));  // valid
    const double levels = std::floor(std::log2(static_cast<double>(needed.size()))) + 1;
    CHECK(static_cast<double>(measure_order(p, *order).peak) <= (static_cast<double>(tree.width()) + 3) * levels + 1);
    recomputed += order->size() > needed.size();
  }
  CHECK(recomputed > 100);
}

TEST_CASE("order_by_separators computes nothing twice without divisions, and respects the limit on its length") {
  const auto p = unit_training_chain(60);
  const auto needed = needed_operations(p);
  const structure::separator_tree tree(p, needed);
  CHECK(order_by_separators(p, tree, needed.size(), 1000) == needed);
  CHECK_FALSE(order_by_separators(p, tree, 1, needed.size()));
  CHECK_FALSE(order_by_separators(p, tree, 1, 100'000, [] { return true; }));
  bytes_t before = 0;
  for (const std::size_t leaf : {1u, 8u, 30u, 60u}) {
    const auto order = order_by_separators(p, tree, leaf, 100'000);
    REQUIRE(order);
    const auto peak = measure_order(p, *order).peak;
    CHECK(peak >= before);
    before = peak;
  }
}

TEST_CASE("twremat on pyramids and complete binary trees") {
  for (const value_id w : {3u, 6u, 10u}) {  // the order of the problem already needs only w + 1
    const auto p = pyramid(w);
    CHECK_FALSE(solve(p, w, twremat{}).found());
    const auto r = solve(p, w + 2, twremat{});
    REQUIRE(r.found());
    CHECK(r.seconds == w * (w + 1) / 2.0);
  }
  for (int levels = 3; levels <= 11; ++levels) {  // in the order of the problem, half of the nodes are live at once
    const auto p = complete_binary_tree(levels);
    CHECK_FALSE(solve(p, levels, twremat{}).found());
    const auto r = solve(p, 2 * levels, twremat{});
    REQUIRE(r.found());
    CHECK(r.seconds < 1.5 * p.total_seconds());
  }
}

TEST_CASE("twremat is near the binomial optimum of unit chains") {
  for (const std::size_t budget : {8u, 9u, 12u, 16u, 32u}) {
    const auto r = solve(unit_training_chain(64), static_cast<bytes_t>(budget), twremat{});
    INFO("budget " << budget);
    REQUIRE(r.found());
    CHECK(r.seconds <= 1.1 * static_cast<double>(65 + chain::revolve_forwards(65, budget - 2)));
  }
  const auto r = solve(unit_training_chain(1500), 60, twremat{});
  REQUIRE(r.found());
  CHECK(r.seconds < 6000);
}

TEST_CASE("twremat passes the conformance suite") {
  for (const auto& failure : check_solver(twremat{}, {.rounds = shortened(1500)})) FAIL_CHECK(failure);
}

TEST_CASE("twremat rarely misses the optimum of small problems") {
  std::mt19937_64 g(53);
  int compared = 0, found = 0, equal = 0;
  for (int round = 0; round < 300; ++round) {
    const auto p = random_problem(g, {.operations = 7, .once = round % 2 * 15});
    const auto all = evaluate(p, store_all_schedule(p)).peak, least = bounds_without_search(p).budget;
    const auto budget = least + (all - least) / 2;
    const auto best = exhaustive_optimum(p, budget);
    if (!best) continue;
    const auto r = solve(p, budget, twremat{});
    ++compared;
    found += r.found();
    equal += r.found() && r.seconds < *best + 1e-9;
  }
  CHECK(compared > 200);
  CHECK(found > compared * 9 / 10);
  CHECK(equal > compared * 8 / 10);
}

TEST_CASE("options of twremat that are out of range are named") {
  CHECK_THROWS_WITH(twremat({.shrink = 1}), Catch::Contains("twremat.shrink"));
  CHECK_THROWS_WITH(twremat({.shrink = std::nan("")}), Catch::Contains("twremat.shrink"));
  CHECK_THROWS_WITH(twremat({.repetitions = 0}), Catch::Contains("twremat.repetitions"));
}
