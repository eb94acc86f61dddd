// SPDX-License-Identifier: Apache-2.0
// Checkpoints at the ends of segments.
#include <catch2/catch.hpp>

#include <tuple>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/chen.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<chen>);

namespace {

const std::vector<chen::variant> variants = {chen::variant::crossing, chen::variant::linearised,
                                             chen::variant::articulation_points, chen::variant::last_node};
const std::vector<chen::division> divisions = {chen::division::square_root, chen::division::equal, chen::division::greedy};

}  // namespace

TEST_CASE("chen on unit chains has the costs of Checkmate's square-root and last-node baselines, in no more memory") {
  for (const auto& [n, cost, peak] : {std::tuple{4u, 11, 5}, {8u, 21, 7}, {16u, 45, 10}, {32u, 89, 14}})
    for (const auto v : {chen::variant::linearised, chen::variant::articulation_points}) {
      INFO("n " << n);
      const auto r =
          leanest(unit_training_chain(n), chen({.backward_start = n, .variant = v, .division = chen::division::square_root}));
      CHECK(r.seconds == cost);
      CHECK(r.peak <= peak);
      CHECK(r.peak >= peak - 3);
    }
  for (const auto& [n, cost] : {std::pair{4u, 19}, {8u, 53}, {16u, 169}, {32u, 593}}) {
    const auto r = leanest(unit_training_chain(n), chen({.variant = chen::variant::last_node}));
    CHECK(r.seconds == cost);
    CHECK(r.peak == 3);
  }
}

TEST_CASE("the default of chen is as fast as each of its variants") {
  std::mt19937_64 g(42);
  int found = 0;
  for (int round = 0; round < shortened(200); ++round) {
    const auto p = round % 2 == 0 ? random_training_chain(g, 12) : random_problem(g, {.operations = 25, .once = 10});
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    const auto budget = all - (all - bounds_without_search(p).budget) / 2;
    const auto best = solve(p, budget, chen{});
    for (const auto v : variants)
      for (const auto d : divisions) {
        const auto r = solve(p, budget, chen({.variant = v, .division = d}));
        if (!r.found()) continue;
        ++found;
        REQUIRE(best.found());
        CHECK(best.seconds <= r.seconds);
      }
  }
  CHECK(found > shortened(300));
}

TEST_CASE("chen checkpoints a transformer in half of its memory, less than 35 % slower") {
  const auto p = transformer_training_graph(16);
  const auto all = evaluate(p, store_all_schedule(p)).peak;
  for (const auto d : divisions) {
    const auto r =
        solve(p, p.held_bytes() + (all - p.held_bytes()) / 2, chen({.variant = chen::variant::crossing, .division = d}));
    REQUIRE(r.found());
    CHECK(r.seconds < 1.35 * p.total_seconds());
  }
}

TEST_CASE("chen passes the conformance suite") {
  for (const auto& failure : check_solver(chen{}, {.rounds = shortened(800)})) FAIL_CHECK(failure);
  for (const auto v : variants)
    for (const auto& failure : check_solver(chen({.variant = v}), {.rounds = shortened(100), .seed = 2})) FAIL_CHECK(failure);
}

TEST_CASE("chen on chains of 1500 layers") {
  const auto p = unit_training_chain(1500);
  const auto r = solve(p, 90, chen{});
  REQUIRE(r.found());
  CHECK(r.seconds < 4600);
  const auto least = solve(p, 3, chen{});
  REQUIRE(least.found());
  CHECK(least.seconds == 1501 * 1502 / 2 + 1500);
}

TEST_CASE("options of chen that are out of range are named") {
  const auto p = unit_training_chain(4);
  CHECK_THROWS_WITH(chen({.tries = 0}), Catch::Contains("chen.tries"));
  CHECK_THROWS_WITH(solve(p, 5, chen({.backward_start = 9})), Catch::Contains("chen.backward_start: no operation 9"));
}
