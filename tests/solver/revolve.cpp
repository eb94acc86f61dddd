// SPDX-License-Identifier: Apache-2.0
// Binomial checkpointing.
#include <catch2/catch.hpp>

#include <random>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<revolve>);

TEST_CASE("revolve finds the optimum of unit chains for every budget") {
  for (std::size_t n = 1; n <= 24; ++n) {
    const auto p = unit_training_chain(n);
    CHECK_FALSE(solve(p, 2, revolve{}).found());
    for (std::size_t budget = 3; budget <= n + 3; ++budget) {
      INFO("n " << n << ", budget " << budget);
      const auto r = solve(p, static_cast<bytes_t>(budget), revolve{});
      REQUIRE(r.found());
      CHECK(r.seconds == static_cast<double>(n + 1 + chain::revolve_forwards(n + 1, budget - 2)));
      if (n <= 6) CHECK(r.seconds == exhaustive_optimum(p, static_cast<bytes_t>(budget)));
    }
  }
}

TEST_CASE("revolve passes the conformance suite") {
  for (const auto& failure : check_solver(revolve{}, {.rounds = shortened(600)})) FAIL_CHECK(failure);
  const revolve few({.blocks = {.size = 1, .most = 3, .interface = 1}, .links = 2, .slots = 10});
  for (const auto& failure : check_solver(few, {.rounds = shortened(200), .seed = 2})) FAIL_CHECK(failure);
}

TEST_CASE("revolve on unequal chains is not slower with more memory") {
  std::mt19937_64 g(44);
  int found = 0, between = 0;
  for (int round = 0; round < 8; ++round) {
    const auto p = random_training_chain(g, 14);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    double before = 0;
    for (auto budget = all; budget > all / 4; budget -= 3) {
      const auto r = solve(p, budget, revolve{});
      if (!r.found()) break;
      ++found;
      CHECK(r.seconds >= before - 1e-9);
      between += r.seconds > before && before > 0;
      before = r.seconds;
    }
  }
  CHECK(found > 100);
  CHECK(between > 40);
}

TEST_CASE("revolve on a long chain, on a network, and on a graph without a chain") {
  const auto p = unit_training_chain(900);
  for (const std::size_t budget : {7u, 60u}) {
    const auto r = solve(p, static_cast<bytes_t>(budget), revolve{});
    REQUIRE(r.found());
    CHECK(r.seconds == static_cast<double>(901 + chain::revolve_forwards(901, budget - 2)));
  }
  const auto network = transformer_training_graph(8);
  const auto all = evaluate(network, store_all_schedule(network)).peak;
  const auto r = solve(network, network.held_bytes() + (all - network.held_bytes()) / 2, revolve{});
  REQUIRE(r.found());
  CHECK(r.seconds < 1.45 * network.total_seconds());
  std::vector<value> values = {{"x", 1, true}, {"a", 5}, {"b", 5}, {"c", 5}};
  const problem triangle("triangle", values, {{"a", {0}, {1}, 1}, {"b", {0, 1}, {2}, 1}, {"c", {0, 1, 2}, {3}, 1}}, {3});
  CHECK_FALSE(solve(triangle, 15, revolve{}).found());
}

TEST_CASE("options of revolve that are out of range are named") {
  CHECK_THROWS_WITH(revolve({.links = 0}), Catch::Contains("revolve.links"));
  CHECK_THROWS_WITH(revolve({.slots = 0}), Catch::Contains("revolve.slots"));
  CHECK_THROWS_WITH(revolve({.slots = 10'001}), Catch::Contains("revolve.slots"));
  CHECK_THROWS_WITH(solve(unit_training_chain(4), 4, revolve({.blocks = {.most = 0}})), Catch::Contains("most"));
}
