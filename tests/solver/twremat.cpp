// SPDX-License-Identifier: Apache-2.0
// Separators of tree decompositions and the recursive schedules they give.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/twremat.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using namespace remat::testing;

static_assert(solver<twremat>);

namespace {

/// One byte and one second per node, given by the operands of each; the last node is the target.
problem pebbles(const std::vector<std::vector<index_t>>& operands) {
  const std::vector<value> values(operands.size(), value{"v", 1, false});
  std::vector<operation> operations;
  for (index_t i = 0; i < operands.size(); ++i) operations.push_back({"o", operands[i], {i}, 1});
  return problem("pebbles", values, operations, {static_cast<index_t>(operands.size() - 1)});
}

/// Row by row from the base of w nodes.
problem pyramid(index_t w) {
  std::vector<std::vector<index_t>> operands(w);
  index_t row = 0;
  for (index_t width = w; width-- > 1; row += width + 1)
    for (index_t i = 0; i < width; ++i) operands.push_back({row + i, row + i + 1});
  return pebbles(operands);
}

/// Level by level from the leaves.
problem complete_binary_tree(int levels) {
  const index_t leaves = index_t{1} << (levels - 1);
  std::vector<std::vector<index_t>> operands(leaves);
  for (index_t i = 0; operands.size() < 2 * leaves - 1; i += 2) operands.push_back({i, i + 1});
  return pebbles(operands);
}

/// Each node reads up to `inputs` of the `reach` before it.
problem banded(std::mt19937_64& g, index_t n, index_t reach, int inputs) {
  std::vector<std::vector<index_t>> operands(n);
  for (index_t i = 1; i < n; ++i) {
    operands[i].push_back(i - 1);
    for (int k = 1; k < inputs; ++k) operands[i].push_back(i - static_cast<index_t>(uniform(g, 1, std::min(i, reach))));
  }
  return pebbles(operands);
}

/// Every needed operation is in one separator; neighbours are in one part or one below the other; children are halves.
void check_tree(const problem& p, const separator_tree& tree) {
  const auto needed = needed_operations(p);
  const auto& parts = tree.parts();
  std::vector<int> seen(p.operations().size(), 0);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].separator.size() <= tree.width() + 1);
    for (auto o : parts[i].separator) {
      ++seen[o];
      CHECK(tree.home(o) == i);
    }
    std::size_t below = parts[i].separator.size();
    for (auto c : parts[i].children) {
      CHECK(2 * parts[c].operations <= parts[i].operations);
      below += parts[c].operations;
    }
    CHECK(below == parts[i].operations);
  }
  for (auto o : needed) {
    CHECK(seen[o] == 1);
    for (auto v : p.operations()[o].inputs)
      if (!p.is_source(v)) CHECK((tree.within(o, tree.home(p.producer(v))) || tree.within(p.producer(v), tree.home(o))));
  }
  CHECK(parts.front().operations == needed.size());
}

}  // namespace

TEST_CASE("separators keep parts apart and halve them") {
  std::mt19937_64 g(51);
  for (int round = 0; round < 200; ++round) {
    const auto p = round % 2 == 0 ? random_problem(g, {.operations = 30}) : random_training_chain(g, 8);
    check_tree(p, separator_tree(p, needed_operations(p)));
  }
  check_tree(transformer_training_graph(10),
             separator_tree(transformer_training_graph(10), needed_operations(transformer_training_graph(10))));
  CHECK(separator_tree(problem{}, {}).empty());
  const auto p = pyramid(5);
  CHECK(separator_tree(p, needed_operations(p), [] { return true; }).empty());
}

TEST_CASE("the width of chains, trees, ladders and complete graphs") {
  const auto width = [](const problem& p) { return separator_tree(p, needed_operations(p)).width(); };
  std::vector<std::vector<index_t>> chain(50), complete(9);
  for (index_t i = 1; i < 50; ++i) chain[i] = {i - 1};
  for (index_t i = 1; i < 9; ++i)
    for (index_t k = 0; k < i; ++k) complete[i].push_back(k);
  CHECK(width(pebbles(chain)) == 1);
  CHECK(width(complete_binary_tree(7)) == 1);
  CHECK(width(unit_training_chain(60)) == 2);
  CHECK(width(pebbles(complete)) == 8);
}

TEST_CASE("undivided parts of one operation need memory for width times logarithm operations") {
  std::mt19937_64 g(52);
  int recomputed = 0;
  for (int round = 0; round < 300; ++round) {
    const auto n = static_cast<index_t>(uniform(g, 10, 120));
    const auto reach = static_cast<index_t>(uniform(g, 1, 4));
    const auto p = round % 5 == 0 ? unit_training_chain(n) : banded(g, n, reach, 2);
    const auto needed = needed_operations(p);
    const separator_tree tree(p, needed);
    const auto order = order_by_separators(p, tree, 1, 10'000'000);
    REQUIRE(order);
    evaluate(p, with_drops(p, *order));  // valid
    const double levels = std::floor(std::log2(static_cast<double>(needed.size()))) + 1;
    CHECK(static_cast<double>(measure_order(p, *order).peak) <= (static_cast<double>(tree.width()) + 3) * levels + 1);
    recomputed += order->size() > needed.size();
  }
  CHECK(recomputed > 100);
}

TEST_CASE("orders by separators: nothing twice if nothing is divided, and a limit on their length") {
  const auto p = unit_training_chain(60);
  const auto needed = needed_operations(p);
  const separator_tree tree(p, needed);
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

TEST_CASE("pyramids and complete binary trees") {
  for (const index_t w : {3u, 6u, 10u}) {  // their order needs w + 1 already
    const auto p = pyramid(w);
    CHECK_FALSE(solve(p, w, twremat{}).found());
    const auto r = solve(p, w + 2, twremat{});
    REQUIRE(r.found());
    CHECK(r.seconds == w * (w + 1) / 2.0);
  }
  for (int levels = 3; levels <= 11; ++levels) {  // in the order of the problem, half of the nodes are there at once
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
    CHECK(r.seconds <= 1.1 * static_cast<double>(65 + revolve_forwards(65, budget - 2)));
  }
  const auto r = solve(unit_training_chain(1500), 60, twremat{});
  REQUIRE(r.found());
  CHECK(r.seconds < 6000);
}

TEST_CASE("twremat conforms to what is asked of solvers") {
  for (const auto& failure : check_solver(twremat{}, {.rounds = 1500})) FAIL_CHECK(failure);
}

TEST_CASE("twremat is rarely above the optimum of small problems") {
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
