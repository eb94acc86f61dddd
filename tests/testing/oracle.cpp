// SPDX-License-Identifier: Apache-2.0
// The exhaustive oracles, against closed forms and each other.
#include <catch2/catch.hpp>

#include <cmath>
#include <limits>
#include <random>

#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>
#include <remat/testing/tier_oracle.hpp>

#include "../pebbles.hpp"
#include "../rounds.hpp"
#include "../staged_oracle.hpp"

using namespace remat;
using namespace remat::testing;

namespace {

/// Griewank and Walther: OPT(n, B) = n + 1 + t(n + 1, B - 2), t(l, s) = r l - C(s + r, s + 1), r least with C(s + r, s) >= l.
double unit_chain_optimum(int n, int budget) {
  const auto choose = [](int a, int b) {
    double c = 1;
    for (int i = 1; i <= b; ++i) c = c * (a - b + i) / i;
    return c;
  };
  const int l = n + 1, s = budget - 2;
  int r = 0;
  while (choose(s + r, s) < l) ++r;
  return n + 1 + r * l - choose(s + r, s + 1);
}

}  // namespace

TEST_CASE("exhaustive_optimum of unit training chains is the binomial optimum") {
  CHECK(unit_chain_optimum(8, 4) == 26);
  CHECK(unit_chain_optimum(6, 4) == 18);
  for (int n = 1; n <= 7; ++n) {
    const auto p = unit_training_chain(static_cast<std::size_t>(n));
    CHECK_FALSE(exhaustive_optimum(p, 2));
    for (int budget = 3; budget <= n + 3; ++budget) {
      INFO("n " << n << ", budget " << budget);
      const auto best = exhaustive_optimum(p, budget);
      REQUIRE(best);
      CHECK(*best == unit_chain_optimum(n, budget));
    }
  }
}

TEST_CASE("exhaustive_optimum: a pyramid of base w needs w + 1 pebbles") {
  for (value_id w = 2; w <= 4; ++w) {
    std::vector<std::vector<value_id>> operands(w);
    index_t row = 0;
    for (index_t width = w; width-- > 1; row += width + 1)
      for (index_t i = 0; i < width; ++i) operands.push_back({row + i, row + i + 1});
    const auto p = pebbles(operands);
    CHECK_FALSE(exhaustive_optimum(p, w));
    CHECK(exhaustive_optimum(p, w + 1) == w * (w + 1) / 2.0);
  }
}

TEST_CASE("exhaustive_optimum: a complete binary tree of h levels needs h + 1 pebbles") {
  for (int levels = 2; levels <= 4; ++levels) {
    const index_t leaves = 1u << (levels - 1);
    std::vector<std::vector<value_id>> operands(leaves);
    for (index_t i = 0; operands.size() < 2 * leaves - 1; i += 2) operands.push_back({i, i + 1});
    const auto p = pebbles(operands);
    CHECK_FALSE(exhaustive_optimum(p, levels));
    CHECK(exhaustive_optimum(p, levels + 1) == (1 << levels) - 1.0);
  }
}

TEST_CASE("exhaustive_optimum recomputes a value after a later operation") {
  // Node 0 does not fit beside the operand and the result of node 2, and node 4 reads node 0 again: 6 computations of 5 nodes.
  const std::vector<value> values = {{"0", 4}, {"1", 4}, {"2", 4}, {"3", 2}, {"4", 3}, {"node 3 was computed", 0}};
  const std::vector<operation> ops = {
      {"0", {}, {0}, 1}, {"1", {0}, {1}, 1}, {"2", {1}, {2}, 1}, {"3", {0, 1}, {3, 5}, 1}, {"4", {2, 0}, {4}, 1}};
  const problem p("p", values, ops, {4, 5});
  CHECK_FALSE(exhaustive_optimum(p, 10));
  CHECK(exhaustive_optimum(p, 11) == 6.0);
  CHECK(exhaustive_optimum(p, 12) == 5.0);
}

TEST_CASE("exhaustive_optimum lies between the trivial bounds and store-all") {
  std::mt19937_64 g(1);
  for (int round = 0; round < shortened(300); ++round) {
    const auto p = random_problem(g, {.operations = 6, .once = 20});
    const auto all = evaluate(p, store_all_schedule(p));
    const auto least = bounds_without_search(p);
    const auto best = exhaustive_optimum(p, all.peak);
    REQUIRE(best);
    CHECK(*best <= all.seconds);
    CHECK(*best == least.seconds);
    CHECK_FALSE(exhaustive_optimum(p, least.budget - 1));
    double before = *best;
    for (auto budget = all.peak; budget >= least.budget; --budget) {
      const auto now = exhaustive_optimum(p, budget);
      if (!now) break;
      CHECK(*now >= before);
      before = *now;
    }
  }
}

TEST_CASE("exhaustive_optimum refuses large problems") {
  CHECK_THROWS_AS(exhaustive_optimum(unit_training_chain(30), 9), bad_option);
}

TEST_CASE("staged_optimum: unit chains, and the price of stages") {
  CHECK(staged_optimum(unit_training_chain(4), 4) == 11.0);
  CHECK(staged_optimum(unit_training_chain(6), 4) == 18.0);
  CHECK_FALSE(staged_optimum(unit_training_chain(4), 2));
  std::mt19937_64 g(1);
  int equal = 0, worse = 0, helped = 0;
  for (int k = 0; k < shortened(1500); ++k) {
    const auto p = random_problem(g, {.operations = 7, .once = 10});
    if (p.values().size() > 12) continue;
    const auto low = bounds_without_search(p).budget, high = evaluate(p, store_all_schedule(p)).peak;
    const auto budget = uniform(g, low, std::max(low, high - 1));
    const auto any = exhaustive_optimum(p, budget);
    const auto staged = staged_optimum(p, budget), more = staged_optimum(p, budget, 1);
    const double never = std::numeric_limits<double>::infinity();
    REQUIRE(any.value_or(never) <= more.value_or(never));
    REQUIRE(more.value_or(never) <= staged.value_or(never));
    equal += any == staged;
    worse += any.value_or(never) < staged.value_or(never);
    helped += more.value_or(never) < staged.value_or(never);
  }
  CHECK(equal > worse);
  CHECK(worse > 0);
  CHECK(helped >= shortened(1));
}

TEST_CASE("exhaustive_optimum_on_tiers equals the other oracle without copies, and is no slower with copies") {
  std::mt19937_64 g(3);
  int compared = 0, faster = 0;
  for (int round = 0; round < 400; ++round) {
    const auto p = random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 4)), .outputs = 1, .once = 20});
    const auto least = bounds_without_search(p).budget, all = evaluate(p, store_all_schedule(p)).peak;
    const auto budget = least + (all - least) / 4;
    const auto best = exhaustive_optimum(p, budget);
    REQUIRE(exhaustive_optimum_on_tiers(p, budget)->seconds == best.value_or(std::numeric_limits<double>::infinity()));
    const problem slow(p.name(), p.values(), p.operations(), p.targets(), copy_rates{1e-6, 1e-6, 0});
    if (const auto optimum = exhaustive_optimum_on_tiers(slow, budget, 4'000); best && optimum) CHECK(optimum->seconds == *best);
    const problem fast(p.name(), p.values(), p.operations(), p.targets(), copy_rates{8, 8, 0});
    const auto optimum = exhaustive_optimum_on_tiers(fast, budget, 4'000);
    if (!optimum) continue;
    REQUIRE(std::isfinite(optimum->seconds));
    REQUIRE(optimum->seconds >= bounds_without_search(p).seconds);
    if (!best) continue;
    REQUIRE(optimum->seconds <= *best);
    ++compared;
    faster += optimum->seconds < *best;
  }
  CAPTURE(compared, faster);
  CHECK((compared > 50 && faster > 3));
}

TEST_CASE("exhaustive_optimum_on_tiers keeps a value on the host while it does not fit on the device") {
  // Value 0 leaves from 1 s to 5 s. It comes back from 11 s, when value 2 has been made, to 19 s.
  const std::vector<operation> ops = {
      {"0", {}, {0}, 1}, {"1", {0}, {1}, 5}, {"2", {1}, {2}, 5, 4}, {"3", {2}, {3}, 3}, {"4", {0, 3}, {4}, 1}};
  const problem p("p", {{"0", 4}, {"1", 2}, {"2", 3}, {"3", 2}, {"4", 1}}, ops, {4}, copy_rates{1, 0.5, 0});
  CHECK(exhaustive_optimum_on_tiers(p, 9)->seconds == 16.0);  // value 0 is recomputed
  auto once = ops;
  once[0].once = true;
  const problem q("q", p.values(), once, {4}, copy_rates{1, 0.5, 0});
  CHECK(exhaustive_optimum_on_tiers(q, 9)->seconds == 20.0);
  CHECK(exhaustive_optimum_on_tiers(q, 13)->seconds == 15.0);
  CHECK(std::isinf(exhaustive_optimum_on_tiers(problem("r", p.values(), once, {4}), 9)->seconds));
}

TEST_CASE("exhaustive_optimum refuses problems that are too large, however large they are") {
  for (const std::size_t n : {41, 81, 200}) CHECK_THROWS_AS(exhaustive_optimum(unit_training_chain(n), 100), bad_option);
}
