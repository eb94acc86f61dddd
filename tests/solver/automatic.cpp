// SPDX-License-Identifier: Apache-2.0
// The default solver: conformance, observers, two threads. `every_solver.cpp` runs it with MILP libraries.
#include <catch2/catch.hpp>

#include <limits>
#include <random>
#include <vector>

#include <remat/solver/automatic.hpp>
#include <remat/solver/chen.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using testing::share_of_peak;

TEST_CASE("automatic passes the conformance suite") {
  const auto failures = testing::check_solver(automatic<>({.search = {.patience = 300}}), {.rounds = testing::shortened(150)});
  for (const auto& failure : failures) FAIL_CHECK(failure);
}

TEST_CASE("automatic reports improvements, and stops when asked to") {
  const auto p = testing::transformer_training_graph(3);
  for (const unsigned threads : {1u, 2u})
    for (const int most : {1, 3, std::numeric_limits<int>::max()}) {
      double best = std::numeric_limits<double>::infinity(), bound = 0;
      int reports = 0;
      const auto r = solve(p, share_of_peak(p, 0.5), automatic<>({.search = {.patience = 200}}), {.threads = threads},
                           [&](const progress& now) {
                             CHECK(now.bound >= bound);
                             CHECK(now.best >= now.bound);
                             if (reports >= most) return control::stop;  // a solver may report once more
                             bound = now.bound;
                             best = std::min(best, now.best);
                             return ++reports == most ? control::stop : control::go_on;
                           });
      CHECK(reports >= 1);
      if (most == 1) continue;
      REQUIRE(r.found());
      CHECK(r.seconds <= best * (1 + 1e-12));
      CHECK(r.bound >= bound);
    }
}

TEST_CASE("automatic is no worse than min_cut") {
  std::mt19937_64 g(11);
  for (int round = 0; round < testing::shortened(40); ++round) {
    const auto p = testing::random_training_chain(g, 8);
    const auto budget = share_of_peak(p, round % 2 == 0 ? 0.5 : 0.7);
    const auto r = solve(p, budget, automatic<>({.search = {.patience = 100}}));
    const auto cut = solve(p, budget, min_cut());
    CHECK(r.found() >= cut.found());
    if (cut.found()) CHECK(r.seconds <= cut.seconds * (1 + 1e-12));
    CHECK(r.bound >= cut.bound);
    CHECK(r.budget_bound >= cut.budget_bound);
  }
}

TEST_CASE("options of automatic that are out of range are named") {
  CHECK_THROWS_WITH(automatic<>({.search = {.patience = 0}}), Catch::Contains("patience"));
}

TEST_CASE("automatic finds the optimum of every small problem, or proves that nothing fits") {
  std::mt19937_64 g(930);
  int found = 0, hopeless = 0;
  for (int round = 0; round < testing::shortened(600); ++round) {
    testing::random_options o{.operations = static_cast<std::size_t>(testing::uniform(g, 4, 8)), .outputs = 2};
    o.once = round % 2 == 0 ? 20 : 0;
    o.density = static_cast<int>(testing::uniform(g, 20, 70));
    o.target = 40;
    const auto p = testing::random_problem(g, o);
    const auto all = measure_store_all(p).peak, least = bounds_without_search(p).budget;
    for (const auto budget : {least, least + (all - least) / 3, least + (all - least) * 2 / 3}) {
      const auto optimum = testing::exhaustive_optimum(p, budget);
      const auto r = solve(p, budget, automatic<>());
      if (!optimum) {
        CHECK(r.status == status::infeasible);
        ++hopeless;
        continue;
      }
      ++found;
      REQUIRE(r.status == status::optimal);
      CHECK(r.seconds <= *optimum * (1 + 1e-4));
    }
  }
  CHECK(found > testing::shortened(800));
  CHECK(hopeless > testing::shortened(100));
}

TEST_CASE("automatic recomputes cheap values if a target that reads them must run last") {
  // While d is made, nothing else fits. The inputs of a and b must be recomputed afterwards.
  const problem p("last",
                  {{"s", 1, true},
                   {"in", 3},
                   {"a", 7},
                   {"a2", 0},
                   {"b", 3},
                   {"b2", 0},
                   {"c", 0},
                   {"d", 5},
                   {"e", 6},
                   {"e2", 2},
                   {"f", 8},
                   {"g", 8},
                   {"h", 8}},
                  {{"a", {1}, {2, 3}, 7},
                   {"b", {1}, {4, 5}, 5},
                   {"c", {0, 4, 5}, {6}, 0},
                   {"d", {1, 6}, {7}, 7},
                   {"e", {3, 7}, {8, 9}, 7},
                   {"f", {}, {10}, 5, 8},
                   {"g", {10}, {11}, 3},
                   {"h", {11}, {12}, 5, 5}},
                  {2, 8, 10, 12});
  const auto r = solve(p, 33, automatic<>());
  REQUIRE(r.found());
  CHECK(r.seconds == *testing::exhaustive_optimum(p, 33));
}
