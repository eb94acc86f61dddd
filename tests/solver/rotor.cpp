// SPDX-License-Identifier: Apache-2.0
// The fastest persistent schedules for a chain of blocks.
#include <catch2/catch.hpp>

#include <cmath>
#include <tuple>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

#include "../networks.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<rotor>);

TEST_CASE("rotor finds nothing without a chain, and refuses options that are out of range") {
  CHECK_FALSE(solve(uncuttable(9), 900, rotor{}).found());
  const auto layers = unit_training_chain(8);
  const auto unfit = solve(layers, 6, rotor({.blocks = {.most = 1, .interface = 1}, .sizes = {}}));
  CHECK(unfit.status == status::not_applicable);
  CHECK(std::isinf(unfit.scope_bound));
  CHECK(solve(layers, 6, rotor{}).found());
  CHECK_THROWS_WITH(rotor({.slots = 0}), Catch::Contains("slots"));
  CHECK_THROWS_WITH(rotor({.table_links = 5000}), Catch::Contains("table_links"));
  CHECK_THROWS_WITH(rotor({.labels = 0}), Catch::Contains("labels"));
  CHECK_THROWS_WITH(rotor({.table_links = 0}), Catch::Contains("table_links"));
  CHECK_THROWS_WITH(solve(layers, 6, rotor({.blocks = {.most = 0}})), Catch::Contains("most"));
  CHECK_THROWS_WITH(solve(layers, 6, rotor({.sizes = {0}})), Catch::Contains("size"));
}

TEST_CASE("rotor on long unit chains is near the binomial optimum") {
  // The links of the chain cost slightly more than the nodes of the unit chain, so rotor may need one more byte.
  for (const auto& [n, budget, optimum] : {std::tuple{12u, 5, 37.0}, {16u, 5, 53.0}, {20u, 6, 63.0}, {32u, 6, 111.0}}) {
    const auto p = unit_training_chain(n);
    const auto r = solve(p, budget + 1, rotor{});
    INFO("n " << n << ", budget " << budget);
    REQUIRE(r.found());
    CHECK(r.seconds <= 1.2 * optimum);
  }
}

TEST_CASE("rotor passes the conformance suite, and is optimal among the schedules of its chain") {
  for (const auto& failure : check_solver(rotor{}, {.rounds = shortened(150)})) FAIL_CHECK(failure);
  std::mt19937_64 g(23);
  for (std::size_t n : {1u, 2u, 5u, 20u, 60u}) {
    const auto p = random_training_chain(g, n);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    std::vector<bytes_t> budgets;
    for (const int percent : {100, 80, 60, 50}) budgets.push_back(all * percent / 100);
    monitor m;
    const auto answers = rotor{}.sweep(p, budgets, m);
    REQUIRE(answers.size() == budgets.size());
    for (std::size_t k = 0; k < budgets.size(); ++k) {
      const auto one = solve(p, budgets[k], rotor{});
      CHECK(answers[k].budget == budgets[k]);
      CHECK(answers[k].found() == one.found());
      if (!one.found()) continue;
      CHECK(answers[k].peak <= budgets[k]);
      CHECK(answers[k].seconds <= 1.02 * one.seconds);
      CHECK(one.scope_gap() <= 1e-9);
    }
  }
  monitor m;
  CHECK(rotor{}.sweep(random_training_chain(g, 3), {}, m).empty());
}
