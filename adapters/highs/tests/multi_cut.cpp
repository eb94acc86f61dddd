// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <random>

#include <remat/highs/backend.hpp>
#include <remat/solver/offmate.hpp>
#include <remat/solver/proving.hpp>
#include <remat/testing/generators.hpp>

#include "../../../tests/backend/checks.hpp"
#include "../../../tests/rounds.hpp"

using namespace remat;

TEST_CASE("highs: multi_cut_bound is never above the optimum", "[long]") {
  testing::check_moment_forms(highs::backend(), 21, 1000);
}
TEST_CASE("highs: multi_cut_bound with moments in any order is never above the optimum", "[long]") {
  testing::check_moment_orders(highs::backend(), 23, 150);
}
TEST_CASE("highs: the order of moments strengthens multi_cut_bound") { testing::check_order_of_moments(highs::backend()); }
TEST_CASE("highs: multi_cut_bound with copies is never above the optimum", "[long]") {
  testing::check_moment_forms_with_copies(highs::backend(), 22, 1000);
}
TEST_CASE("highs: a longer time limit never weakens multi_cut_bound") { testing::check_multi_cut_limits(highs::backend()); }
TEST_CASE("highs: the solver of moments conforms to the solver suite and proves optima") {
  testing::check_moments(highs::backend());
}
TEST_CASE("highs: proving returns the same time with a stronger bound") {
  std::mt19937_64 g(3);
  const offmate<> method(min_cut{}, {.scan = 4, .inner = 1, .starts = 2, .effort = 20'000, .idle = 1});
  const proving<offmate<>, highs::backend> both(method);
  CHECK(both.name() == method.name());
  int stronger = 0;
  for (int round = 0; round < testing::shortened(10); ++round) {
    const auto plain = testing::random_training_chain(g, 5);
    const auto all = evaluate(plain, store_all_schedule(plain));
    const double rate = static_cast<double>(all.peak) / (3 * all.seconds);
    const auto p = plain.with_copies(copy_rates{rate, rate, 0});
    const auto least = bounds_without_search(p).budget, budget = least + (all.peak - least) / 10;
    const auto alone = solve(p, budget, method), proven = solve(p, budget, both), other = solve(plain, budget, both);
    REQUIRE(proven.found());
    CHECK(proven.seconds == Approx(alone.seconds));
    CHECK(proven.bound >= alone.bound);
    CHECK(proven.bound <= proven.seconds * (1 + 1e-9));
    stronger += proven.bound > alone.bound * (1 + 1e-6);
    if (other.found()) CHECK(other.seconds >= proven.bound * (1 - 1e-9));
  }
  CHECK(stronger >= testing::shortened(3));
}
