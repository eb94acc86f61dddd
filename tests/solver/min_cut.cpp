// SPDX-License-Identifier: Apache-2.0
// Multipliers of minimum cuts, and schedules from them.
#include <catch2/catch.hpp>

#include <limits>
#include <random>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<min_cut>);

TEST_CASE("min_cut is never below the optimum nor its bound above it, and is often optimal") {
  std::mt19937_64 g(5);
  int compared = 0, equal = 0, missed = 0;
  for (int round = 0; round < shortened(400); ++round) {
    const auto p =
        round % 4 == 0 ? random_training_chain(g, 3) : random_problem(g, {.operations = 7, .once = round % 4 == 1 ? 25 : 0});
    const auto all = evaluate(p, store_all_schedule(p));
    for (auto budget = all.peak; budget >= all.peak / 2; budget -= 3) {
      const auto best = exhaustive_optimum(p, budget);
      const auto r = solve(p, budget, min_cut{}, {.gap = 0});
      if (!best) {
        CHECK_FALSE(r.found());
        break;
      }
      CHECK(r.status != status::infeasible);
      ++compared;
      if (!r.found()) {
        ++missed;
        continue;
      }
      REQUIRE(r.bound <= *best + 1e-9);
      REQUIRE(r.seconds >= *best - 1e-9);
      equal += r.seconds < *best + 1e-9;
      if (r.status == status::optimal) CHECK(r.seconds == Approx(*best));
    }
  }
  CHECK(compared > shortened(800));
  CHECK(equal > compared * 95 / 100);
  CHECK(missed < compared / 20);
}

TEST_CASE("min_cut passes the conformance suite") {
  const auto failures = check_solver(min_cut({.effort = 200}), {.rounds = shortened(1000), .seed = 2});
  for (const auto& f : failures) UNSCOPED_INFO(f);
  CHECK(failures.empty());
}

TEST_CASE("a sweep of min_cut is never slower for more budget, and mostly finds the optimum", "[long]") {
  std::mt19937_64 g(6);
  int compared = 0, equal = 0;
  for (int round = 0; round < 150; ++round) {
    const auto p = round % 3 == 0 ? random_training_chain(g, 3) : random_problem(g, {.operations = 7});
    const auto all = evaluate(p, store_all_schedule(p));
    std::vector<bytes_t> budgets;
    for (auto part : {70, 100, 50, 90, 70, 80}) budgets.push_back(all.peak * part / 100);
    monitor m(limits{.seconds = std::numeric_limits<double>::infinity(), .gap = 0});
    const auto results = min_cut{}.sweep(p, budgets, m);
    REQUIRE(results.size() == budgets.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto& r = results[i];
      CHECK(r.budget == budgets[i]);
      CHECK(r.solver == "min_cut");
      const auto optimum = exhaustive_optimum(p, budgets[i]);
      if (!optimum) {
        REQUIRE_FALSE(r.found());
        continue;
      }
      REQUIRE(r.status != status::infeasible);
      REQUIRE(r.bound <= *optimum + 1e-9);
      if (!r.found()) continue;
      REQUIRE(r.peak <= r.budget);
      REQUIRE(evaluate(p, r.schedule).peak == r.peak);
      ++compared;
      equal += r.seconds <= *optimum + 1e-9;
      for (std::size_t j = 0; j < results.size(); ++j)
        if (budgets[j] >= budgets[i]) {
          REQUIRE(results[j].found());
          REQUIRE(results[j].seconds <= r.seconds);
        }
    }
  }
  CHECK(compared > 300);
  CHECK(equal > compared * 95 / 100);
  const auto p = unit_training_chain(4);
  monitor m;
  CHECK_THROWS_AS(min_cut{}.sweep(p, std::vector<bytes_t>{5, -1}, m), bad_option);
  CHECK(min_cut{}.sweep(p, {}, m).empty());
}

TEST_CASE("min_cut on captured networks stays near the bound", "[long]") {
  // Upper limits of the extra time in % of store-all, at budgets of 0.8, 0.5 and a small share of the peak of store-all above the
  // held bytes.
  struct row {
    const char* name;
    double at_8, at_5, small, at_small;
  };
  for (const auto& r : {row{"gpt2-layers-2-seq-256", 3.1, 14.1, .4, 24.5}, row{"gpt2-layers-12", 2.9, 8.5, .2, 25},
                        row{"unet-depth-4", 3.9, 13.9, .3, 47}, row{"resnet18", 2.7, 14.0, .4, 60},
                        row{"mobilenet-v3-small", 1.7, 6.6, .2, 18}}) {
    const auto p = instance(r.name);
    const auto all = evaluate(p, store_all_schedule(p));
    const auto at = [&](double f) {
      return p.held_bytes() + static_cast<bytes_t>(f * static_cast<double>(all.peak - p.held_bytes()));
    };
    INFO(r.name);
    const min_cut quick({.repairs = 40000, .effort = 200000});
    const auto loose = solve(p, at(.8), quick), tight = solve(p, at(.5), quick), least = solve(p, at(r.small), quick);
    REQUIRE(loose.found());
    REQUIRE(tight.found());
    REQUIRE(least.found());
    CHECK(100 * (loose.seconds / all.seconds - 1) < r.at_8);
    CHECK(100 * (tight.seconds / all.seconds - 1) < r.at_5);
    CHECK(100 * (least.seconds / all.seconds - 1) < r.at_small);
    CHECK(solve(p, all.peak, min_cut{}).seconds == Approx(all.seconds));
  }
}

TEST_CASE("min_cut proves budgets below its cuts infeasible") {
  const auto p = unit_training_chain(4);
  const auto r = solve(p, 2, min_cut{});
  CHECK(r.status == status::infeasible);
  const auto vit = instance("gpt2-layers-2-seq-256");
  const auto all = evaluate(vit, store_all_schedule(vit));
  const auto few = solve(vit, vit.held_bytes() + (all.peak - vit.held_bytes()) / 5, min_cut{});
  CHECK(few.status == status::infeasible);
  CHECK(few.budget_bound > few.budget);
}

TEST_CASE("min_cut stops when told to, and refuses options that are out of range") {
  const auto p = transformer_training_graph(12);
  const auto peak = evaluate(p, store_all_schedule(p)).peak;
  const auto r = solve(p, peak / 2, min_cut{}, {.seconds = 0});
  CHECK(r.status != status::infeasible);
  CHECK_THROWS_AS(min_cut({.moments = 0}), bad_option);
  CHECK_THROWS_AS(min_cut({.cuts = 1}), bad_option);
  CHECK_THROWS_AS(min_cut({.mixtures = 0}), bad_option);
}

TEST_CASE("min_cut on ten thousand operations finds a schedule near the bound, and stops when an observer asks") {
  const auto p = transformer_training_graph(323);
  CHECK(p.operations().size() > 10000);
  const auto budget = evaluate(p, store_all_schedule(p)).peak / 2;
  const auto near = solve(p, budget, min_cut({.repairs = 0, .effort = 0}), {.seconds = 600});
  REQUIRE(near.found());
  CHECK(near.gap() < 0.005);
  int reports = 0;
  const auto first = solve(p, budget, min_cut{}, {.seconds = 600}, [&](const progress&) { return ++reports, control::stop; });
  CHECK(first.found());
  CHECK(reports == 1);  // each phase polls before its first step
}
