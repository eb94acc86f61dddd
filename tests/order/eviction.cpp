// SPDX-License-Identifier: Apache-2.0
// Peak and time of orders, and evictions.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>

#include <remat/core/evaluate.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/retain_more.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using namespace remat::testing;

TEST_CASE("measure_order agrees with evaluate") {
  std::mt19937_64 g(3);
  for (int round = 0; round < 500; ++round) {
    const auto p = random_problem(g, {.operations = 8});
    auto order = needed_operations(p);
    for (int i = 0; i < 4; ++i) {  // repeat an operation later
      const auto at = uniform(g, 0, static_cast<std::int64_t>(order.size()) - 1);
      order.insert(order.begin() + uniform(g, at + 1, static_cast<std::int64_t>(order.size())),
                   order[static_cast<std::size_t>(at)]);
    }
    const auto judged = evaluate(p, with_drops(p, order));
    const auto needs = measure_order(p, order);
    CHECK(needs.peak == judged.peak);
    CHECK(needs.seconds == Approx(judged.seconds));
    const auto pruned = prune_order(p, order);
    CHECK(evaluate(p, with_drops(p, pruned)).peak <= judged.peak);
    CHECK(prune_order(p, pruned) == pruned);
  }
}

TEST_CASE("eviction makes orders within the budget") {
  std::mt19937_64 g(4);
  int fitted = 0;
  for (int round = 0; round < 500; ++round) {
    const auto p = random_problem(g, {.operations = 9, .held = 40, .once = 20});
    const auto order = needed_operations(p);
    const auto peak = measure_order(p, order).peak;
    for (auto budget = peak - 1; budget > peak / 2; budget -= 2) {
      const auto played = order::eviction(p, order).run(budget, {});
      if (!played) continue;
      ++fitted;
      const auto e = evaluate(p, with_drops(p, *played));
      REQUIRE(e.peak <= std::max(budget, p.source_bytes()));
      const auto better = order::retain_more(p, *played, budget);
      const auto after = evaluate(p, with_drops(p, better));
      REQUIRE(after.peak <= std::max(budget, p.source_bytes()));
      REQUIRE(after.seconds <= e.seconds);
    }
  }
  CHECK(fitted > 100);
}

TEST_CASE("eviction stops when told to, and at its limit of work") {
  const auto p = transformer_training_graph(12);
  const auto order = needed_operations(p);
  const auto budget = evaluate(p, store_all_schedule(p)).peak * 7 / 10;
  CHECK(order::eviction(p, order).run(budget, {}));
  CHECK_FALSE(order::eviction(p, order).run(budget, {.work = 10}));
  int polls = 0;
  CHECK_FALSE(order::eviction(p, order).run(budget, {}, [&] { return ++polls, true; }));
  CHECK(polls == 1);
}
