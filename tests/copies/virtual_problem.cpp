// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <vector>

#include <remat/copies/virtual_problem.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/testing/generators.hpp>

#include "../rounds.hpp"

using namespace remat;
using remat::testing::uniform;

namespace {

/// Budgets that first rise and then fall.
std::vector<bytes_t> some_budgets(std::mt19937_64& g) {
  std::vector<bytes_t> budgets(static_cast<std::size_t>(uniform(g, 1, 12)));
  for (auto& b : budgets) b = uniform(g, 0, 30);
  const auto top = budgets.begin() + uniform(g, 0, static_cast<std::int64_t>(budgets.size()));
  std::sort(budgets.begin(), top);
  std::sort(top, budgets.end(), std::greater<>());
  return budgets;
}

}  // namespace

TEST_CASE("ballast fills the difference between a budget and the largest budget") {
  std::mt19937_64 g(3);
  int with_ballast = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 9)), .sources = 1});
    const auto needed = needed_operations(p);
    const auto budgets = some_budgets(g);
    const copies::virtual_problem q(p, needed, budgets);
    const auto plain = measure_order(p, needed), with = measure_order(q.problem(), q.wrap(needed));
    CHECK(with.seconds == Approx(plain.seconds));
    const auto back = q.unwrap(q.wrap(needed));
    REQUIRE(back.order == needed);
    REQUIRE(back.positions.size() == needed.size() + 1);
    CHECK(back.positions.back() == q.wrap(needed).size());
    std::vector<bytes_t> levels;
    double now = 0;
    for (auto o : needed) {
      const auto part = plain.seconds > 0 ? now / plain.seconds * static_cast<double>(budgets.size()) : 0;
      levels.push_back(budgets[std::min(static_cast<std::size_t>(part), budgets.size() - 1)]);
      now += p.operations()[o].seconds;
    }
    CHECK(q.budget() == *std::max_element(levels.begin(), levels.end()));
    for (std::size_t k = 0; k < needed.size(); ++k) {
      const auto ballast = with.memory[back.positions[k]] - plain.memory[k];
      CHECK(ballast == q.budget() - levels[k]);
      with_ballast += ballast > 0;
    }
  }
  CHECK(with_ballast > 300);
}

TEST_CASE("orders with recomputations map to the virtual problem and back, and its plans are plans of the problem") {
  std::mt19937_64 g(4);
  int found = 0;
  for (int round = 0; round < testing::shortened(200); ++round) {
    const auto p = testing::random_training_chain(g, static_cast<std::size_t>(uniform(g, 2, 5)));
    const auto all = measure_order(p, needed_operations(p)).peak, least = all * 6 / 10, middle = all * 8 / 10;
    const copies::virtual_problem q(p, needed_operations(p), std::vector<bytes_t>{least, middle, all, middle, least});
    const auto r = solve(q.problem(), q.budget(), min_cut({.repairs = 1000, .effort = 1000}), {.seconds = 1e9});
    if (!r.found()) continue;
    ++found;
    const auto order = compute_order(r.schedule);
    const auto back = q.unwrap(order);
    for (std::size_t k = 0; k < back.order.size(); ++k)
      CHECK(q.unwrap(std::vector{order[back.positions[k]]}).order[0] == back.order[k]);
    CHECK(measure_order(p, back.order).peak <= q.budget());
    const auto again = q.unwrap(q.wrap(back.order)).order;
    CHECK(again == back.order);
    CHECK(measure_order(q.problem(), q.wrap(back.order)).seconds == Approx(r.seconds));
  }
  CHECK(found > testing::shortened(50));
}

TEST_CASE("early_order puts everything that can run before a given operation in front of it") {
  std::mt19937_64 g(6);
  int moved = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 12)), .sources = 2});
    const auto needed = needed_operations(p);
    const auto tau = needed[static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(needed.size()) - 1))];
    const auto order = copies::early_order(p, tau);
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    REQUIRE(sorted == needed);
    std::vector<bool> made(p.operations().size(), false), after(made), reads(made);
    bool passed = false;
    for (auto o : order) {
      for (auto v : p.operations()[o].inputs)
        if (!p.is_source(v)) {
          REQUIRE(made[p.producer(v)]);
          reads[o] = true;
          after[o] = after[o] || after[p.producer(v)];
        }
      made[o] = true;
      passed = passed || o == tau;
      after[o] = after[o] || o == tau;
      if (passed && !after[o] && reads[o]) {  // only after readers of sources alone, which keep their place
        const auto& inputs = p.operations()[o].inputs;
        CHECK(std::any_of(inputs.begin(), inputs.end(), [&](auto v) { return !p.is_source(v) && p.producer(v) > tau; }));
      }
    }
    moved += order != needed;
  }
  CHECK(moved > 50);
}

TEST_CASE("virtual_problem makes operations that its order moves forward once-only if asked, and no others") {
  std::mt19937_64 g(8);
  int early = 0;
  for (int round = 0; round < 600; ++round) {
    const auto p = testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 12)), .sources = 2});
    const auto needed = needed_operations(p);
    const auto tau = needed[static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(needed.size()) - 1))];
    const auto order = copies::early_order(p, tau);
    const bool once = round % 2 == 0;
    const copies::virtual_problem q(p, order, std::vector<bytes_t>{1}, once);
    const auto& operations = q.problem().operations();
    REQUIRE(operations.size() == order.size());
    for (std::size_t k = 0; k < order.size(); ++k) {
      const bool moved =
          std::any_of(order.begin() + static_cast<std::ptrdiff_t>(k), order.end(), [&](auto o) { return o < order[k]; });
      CHECK(operations[k].once == (p.operations()[order[k]].once || (once && moved)));
      early += once && moved;
    }
  }
  CHECK(early > 50);
}
