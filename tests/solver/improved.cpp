// SPDX-License-Identifier: Apache-2.0
// Solvers that improve the schedule of another solver by local search.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <remat/solver/chen.hpp>
#include <remat/solver/improved.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../chain_or_random.hpp"
#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<improved<store_all>>);

TEST_CASE("improved is never worse than its start, and mostly finds the optimum") {
  std::mt19937_64 g(13);
  int compared = 0, better = 0, optimal = 0, missed = 0;
  for (int round = 0; round < shortened(300); ++round) {
    const auto p = chain_or_random(g, round);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    for (const auto part : {90, 75, 60}) {
      const auto budget = all * part / 100;
      const auto optimum = exhaustive_optimum(p, budget);
      const auto start = solve(p, budget, chen{});
      const auto r = solve(p, budget, improved<chen>(chen{}, {.search = {.patience = 300}}), {.seed = 5, .gap = 0});
      if (!optimum) {
        REQUIRE_FALSE(r.found());
        continue;
      }
      ++compared;
      if (start.found()) {
        REQUIRE(r.found());
        REQUIRE(r.seconds <= start.seconds);
      }
      missed += !r.found();
      if (!r.found()) continue;
      better += !start.found() || r.seconds < start.seconds;
      optimal += r.seconds <= *optimum * (1 + 1e-9);
    }
  }
  CHECK(compared > shortened(250));
  CHECK(better > compared / 3);
  CHECK(optimal > compared * 9 / 10);
  CHECK(missed < compared / 10);
}

TEST_CASE("improved passes the conformance suite") {
  const auto failures =
      check_solver(improved<store_all>(store_all{}, {.search = {.patience = 30}}), {.rounds = shortened(1000), .seed = 3});
  for (const auto& f : failures) UNSCOPED_INFO(f);
  CHECK(failures.empty());
}

TEST_CASE("improved gives equal schedules for equal seeds, and reports each improvement") {
  const auto p = instance("unet-depth-4");
  const auto all = evaluate(p, store_all_schedule(p));
  const auto budget = p.held_bytes() + (all.peak - p.held_bytes()) / 2;
  const improved<store_all> method(store_all{}, {.search = {.patience = 50}});
  std::vector<double> reported;
  const auto first = solve(p, budget, method, {.seed = 1}, [&](const progress& now) { reported.push_back(now.best); });
  REQUIRE(first.found());
  CHECK(first.seconds < 1.2 * all.seconds);
  CHECK(reported.size() > 2);
  CHECK(std::is_sorted(reported.rbegin(), reported.rend()));
  CHECK(reported.back() == Approx(first.seconds));
  CHECK(solve(p, budget, method, {.seed = 1}).schedule == first.schedule);
  CHECK(solve(p, budget, method, {.seed = 2}).schedule != first.schedule);
  int told = 0;
  const auto stopped = solve(p, budget, method, {.seed = 1}, [&](const progress&) { return ++told, control::stop; });
  CHECK(told == 1);
  CHECK(stopped.found());
}

TEST_CASE("a longer search of improved continues a shorter search, and is never worse") {
  std::mt19937_64 g(17);
  int better = 0;
  for (int round = 0; round < shortened(60); ++round) {
    const auto p = random_training_chain(g, 12);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    double before = std::numeric_limits<double>::infinity();
    for (const std::size_t patience : {1, 5, 25, 125}) {
      const auto r = solve(p, all * 6 / 10, improved<store_all>(store_all{}, {.search = {.patience = patience}}), {.seed = 3});
      if (!r.found()) continue;
      REQUIRE(r.seconds <= before * (1 + 1e-12));
      better += r.seconds < before * (1 - 1e-12) && std::isfinite(before);
      before = r.seconds;
    }
  }
  CHECK(better > shortened(20));
}

TEST_CASE("options of improved that are out of range are named") {
  CHECK_THROWS_WITH((improved<store_all>(store_all{}, {.search = {.patience = 0}})), Catch::Contains("patience"));
  CHECK_THROWS_WITH((improved<store_all>(store_all{}, {.seconds = 0})), Catch::Contains("seconds"));
}
