// SPDX-License-Identifier: Apache-2.0
// The exhaustive search over orders of small problems, against an independent exhaustive search.
#include <catch2/catch.hpp>

#include <cmath>
#include <limits>
#include <random>

#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/order/exact_order_search.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;
using order::exact_order_search;

TEST_CASE("exact_order_search finds the optimum of small problems, or proves that nothing fits") {
  std::mt19937_64 g(1);
  int found = 0, hopeless = 0;
  for (int round = 0; round < shortened(400); ++round) {
    const auto p = round % 4 == 0 ? random_training_chain(g, 4)
                                  : random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 1, 9)),
                                                       .outputs = 1 + static_cast<std::size_t>(round % 2),
                                                       .once = round % 3 == 0 ? 25 : 0,
                                                       .density = static_cast<int>(uniform(g, 20, 70))});
    REQUIRE(exact_order_search::supports(p));
    const auto all = measure_store_all(p).peak, least = bounds_without_search(p).budget;
    for (const auto budget : {least - 1, least, least + (all - least) / 4, least + (all - least) / 2, all}) {
      const auto optimum = exhaustive_optimum(p, budget);
      exact_order_search search(p, budget);
      const auto any = search.any(), best = search.fastest();
      REQUIRE((any.complete && best.complete));
      REQUIRE(any.order.has_value() == optimum.has_value());
      REQUIRE(best.order.has_value() == optimum.has_value());
      if (!optimum) {
        CHECK((std::isinf(any.bound) && std::isinf(best.bound)));
        ++hopeless;
        continue;
      }
      ++found;
      CHECK(evaluate(p, with_drops(p, *any.order)).peak <= budget);
      const auto e = evaluate(p, with_drops(p, *best.order));
      CHECK(e.peak <= budget);
      CHECK(e.seconds == Approx(*optimum).epsilon(1e-12));
      CHECK(best.bound <= *optimum);
      CHECK(best.bound == Approx(*optimum).epsilon(1e-9));
      const auto faster = search.fastest(*optimum);  // no order is faster
      CHECK((faster.complete && !faster.order && faster.bound == Approx(*optimum).epsilon(1e-9)));
    }
  }
  CHECK(found > shortened(1000));
  CHECK(hopeless > shortened(300));
}

TEST_CASE("a exact_order_search that gives up says so, and returns a bound") {
  std::mt19937_64 g(3);
  const auto p = random_training_chain(g, 15);
  const auto least = bounds_without_search(p).budget, budget = least + (measure_store_all(p).peak - least) / 3;
  REQUIRE(exact_order_search::supports(p));
  exact_order_search search(p, budget);
  const auto any = search.any();
  REQUIRE(any.order);
  const auto few = search.fastest(std::numeric_limits<double>::infinity(), 20'000);
  CHECK((!few.complete && !few.order));
  CHECK(few.bound > bounds_without_search(p).seconds);
  CHECK(few.bound <= measure_order(p, *any.order).seconds);
  int polls = 0;
  const auto stopped = search.fastest(std::numeric_limits<double>::infinity(), 1'000'000, [&] { return ++polls == 3; });
  CHECK((!stopped.complete && !stopped.order && polls == 3));
  CHECK(stopped.bound <= few.bound);
}

TEST_CASE("exact_order_search takes problems of up to 64 operations and values without in-place updates") {
  const auto made = [](std::size_t n) {  // each operation reads the value before
    std::vector<value> values(n, {"v", 1});
    std::vector<operation> operations(n);
    for (std::size_t i = 0; i < n; ++i) {
      if (i > 0) operations[i].inputs = {i - 1};
      operations[i].outputs = {i};
      operations[i].seconds = 1;
    }
    return problem("made", values, operations, {n - 1});
  };
  CHECK(exact_order_search::supports(made(64)));
  CHECK(!exact_order_search::supports(made(65)));
  CHECK(exact_order_search(made(64), 2).any().order);  // 64 operations, with one bit each
  CHECK(!exact_order_search(made(64), 1).any().order);
  CHECK(!exact_order_search::supports(
      problem("in place", {{"a", 1}, {"b", 1}},
              {{"make", {}, {0}, 1}, {"change", {0}, {1}, 1, 0, false, "", device_tier, {{1, 0}}}}, {1})));
}
