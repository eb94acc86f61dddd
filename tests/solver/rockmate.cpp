// SPDX-License-Identifier: Apache-2.0
// Blocks with several options each, joined along their chain. Compared on small problems with store_all, chen and rotor.
#include <catch2/catch.hpp>

#include <algorithm>
#include <utility>

#include <remat/core/solve.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/improved.hpp>
#include <remat/solver/rockmate.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<store_all> && solver<rockmate<>> && solver<rockmate<chen>>);

TEST_CASE("store_all, chen, rotor and rockmate are never below the optimum of small problems") {
  std::mt19937_64 g(22);
  int compared = 0, equal = 0, rotor_found = 0, chen_found = 0, faster_with_less = 0;
  for (int round = 0; round < shortened(90); ++round) {
    const auto p = round % 3 == 0   ? random_training_chain(g, 3)
                   : round % 3 == 1 ? random_problem(g, {.operations = 7, .once = 20})
                                    : unit_training_chain(static_cast<std::size_t>(2 + round % 5));
    const auto all = evaluate(p, store_all_schedule(p));
    double before = 0;
    for (auto budget = all.peak; budget >= all.peak / 2; budget -= 2) {
      const auto best = exhaustive_optimum(p, budget);
      if (!best) break;
      const auto stored = solve(p, budget, store_all{}), segments = solve(p, budget, chen{}), chained = solve(p, budget, rotor{}),
                 blocks = solve(p, budget, rockmate<>{}, {.gap = 0});
      CHECK(stored.found() == (budget >= measure_order(p, needed_operations(p)).peak));
      for (const auto* r : {&stored, &segments, &chained, &blocks}) {
        CHECK(r->status != status::infeasible);
        if (r->found()) REQUIRE(r->seconds >= *best - 1e-9);
      }
      chen_found += segments.found() && segments.recomputed > 0;
      rotor_found += chained.found() && chained.recomputed > 0;
      ++compared;
      if (!blocks.found()) continue;
      equal += blocks.seconds < *best + 1e-9;
      faster_with_less += blocks.seconds < before - 1e-9;
      before = std::max(before, blocks.seconds);
    }
  }
  CHECK(compared > shortened(200));
  CHECK(equal > compared * 9 / 10);
  CHECK(faster_with_less <= std::max(1, compared / 200));  // a heuristic: rare exceptions are allowed
  CHECK(rotor_found > shortened(20));
  CHECK(chen_found > shortened(20));
}

TEST_CASE("rockmate proves no bound, and improved<rockmate> is no slower", "[long]") {
  for (const auto* name : {"gpt2-layers-2-seq-256", "resnet18", "unet-depth-4"}) {
    const auto p = instance(name);
    const auto all = evaluate(p, store_all_schedule(p));
    INFO(name);
    CHECK(solve(p, all.peak, rockmate<>{}).seconds == Approx(bounds_without_search(p).seconds));
    const auto budget = share_of_peak(p, .8);
    const auto r = solve(p, budget, rockmate<>{});
    REQUIRE(r.found());
    CHECK(r.bound == Approx(bounds_without_search(p).seconds));  // no bound beyond the trivial one
    const improved<rockmate<>> bettered(rockmate<>{}, {.search = {.patience = 20}});
    CHECK(solve(p, budget, bettered).seconds <= r.seconds);
  }
}

TEST_CASE("rockmate accepts another solver for its blocks, and can be stopped") {
  const auto p = transformer_training_graph(4);
  const auto budget = share_of_peak(p, .5);
  const auto r = solve(p, budget, rockmate(chen{}));
  REQUIRE(r.found());
  CHECK(r.solver == "rockmate/chen");
  CHECK(r.seconds < 1.3 * p.total_seconds());
  int reports = 0;
  const auto stopped = solve(p, budget, rockmate(chen{}), {}, [&](const progress&) {
    ++reports;
    return control::stop;
  });
  CHECK(reports == 1);
  CHECK(stopped.status != status::infeasible);
}

TEST_CASE("rockmate refuses a graph that cannot be cut, unless its inner solver takes the whole graph") {
  const auto p = unit_training_chain(12);  // 25 operations
  const auto uncut = [](std::size_t leaf) {
    return rockmate<store_all>(store_all{}, {.cut = {.most = 1}, .leaf_operations = leaf});
  };
  const auto r = solve(p, 8, uncut(20));
  CHECK(r.status == status::not_applicable);
  CHECK(r.reason == "the graph cannot be cut into parts");
  CHECK(solve(p, 8, uncut(40)).status == status::not_found);
}

TEST_CASE("options of rockmate that are out of range are refused") {
  CHECK_THROWS_AS(rockmate<>(min_cut{}, {.saved = 0}), bad_option);
  CHECK_THROWS_AS(rockmate<>(min_cut{}, {.peaks = 0}), bad_option);
}
