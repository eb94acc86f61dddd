// SPDX-License-Identifier: Apache-2.0
// The default solver: conformance, observers, two threads. With MILP libraries it runs in every_solver.cpp.
#include <catch2/catch.hpp>

#include <limits>
#include <random>
#include <vector>

#include <remat/solver/automatic.hpp>
#include <remat/solver/chen.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"

using namespace remat;
using testing::share_of_peak;

TEST_CASE("automatic conforms") {
  const auto failures = testing::check_solver(automatic<>({.search = {.patience = 300}}), {.rounds = 150});
  for (const auto& failure : failures) FAIL_CHECK(failure);
}

TEST_CASE("automatic gets better while it is watched, and stops when asked to") {
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

TEST_CASE("automatic is no worse than the solvers it runs") {
  std::mt19937_64 g(11);
  for (int round = 0; round < 40; ++round) {
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

TEST_CASE("options of automatic out of range are refused by name") {
  CHECK_THROWS_WITH(automatic<>({.search = {.patience = 0}}), Catch::Contains("patience"));
}
