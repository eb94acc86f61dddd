// SPDX-License-Identifier: Apache-2.0
// Planners for a device and a host: weights, gradients and optimizers on both.
#include <catch2/catch.hpp>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include <remat/bound/tier_bound.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/order/residence.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/solver/offmate.hpp>

#include "../tiers.hpp"

using remat::problem;
using remat::testing::chance;
using remat::testing::host;
using remat::testing::random_step;
using remat::testing::random_tiers_problem;
using remat::testing::uniform;

namespace {

const remat::limits no_hurry{.seconds = std::numeric_limits<double>::infinity()};

/// A problem that can be planned.
problem two_tier_problem(std::mt19937_64& g, bool step) {
  for (;;) {
    auto p = step ? random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 1, 4)), .cyclic = chance(g, 50)})
                  : random_tiers_problem(g);
    if (!p.plain() && remat::order::unplannable(p).empty()) return p;
  }
}

}  // namespace

TEST_CASE("no valid schedule on two tiers is faster than the bound") {
  std::mt19937_64 g(31);
  int compared = 0, met = 0, tight = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto p = two_tier_problem(g, round % 2 == 0);
    const auto s = remat::testing::tiers_walk(g, p).run();
    const auto valid = remat::testing::evaluated(p, s);
    if (!valid) continue;
    const auto& e = *valid;
    INFO("round " << round);
    const auto bound = remat::bound::tier_bound(p, e.peak);
    REQUIRE(bound <= e.seconds * (1 + 1e-9) + 1e-9);
    ++compared;
    met += bound >= e.seconds - 1e-9;
    tight += bound > remat::bounds_without_search(p).seconds + 1e-9;
  }
  CAPTURE(compared, met, tight);
  CHECK(compared > 500);
  CHECK(met > 150);
  CHECK(tight > 1000);
}

TEST_CASE("planners for two tiers: valid, within both budgets, in order") {
  std::mt19937_64 g(32);
  int found = 0, missed = 0, optimal = 0, better = 0;
  const remat::offmate<> both(remat::min_cut{}, {.search = 20'000, .idle = 1});
  for (int round = 0; round < 400; ++round) {
    auto p = two_tier_problem(g, round % 4 != 0);
    if (chance(g, 20)) p = remat::testing::with_budgets(p, {std::nullopt, uniform(g, 20, 60)});
    const auto least = remat::bounds_without_search(p).budget;
    INFO("round " << round);
    if (least > 0) CHECK(remat::solve(p, least - 1, both, no_hurry).status == remat::status::infeasible);
    const auto budget = least + uniform(g, 0, 12);
    const auto r = remat::solve(p, budget, both, no_hurry), copied = remat::solve(p, budget, remat::offload_only(), no_hurry);
    CHECK(r.status != remat::status::infeasible);
    if (copied.found()) REQUIRE(r.found());
    r.found() ? ++found : ++missed;
    if (!r.found()) continue;
    CHECK(r.peak <= budget);
    CHECK((!p.tiers()[host].budget || r.peaks[host] <= *p.tiers()[host].budget));
    CHECK(r.bound <= r.seconds * (1 + 1e-9));
    if (copied.found()) CHECK(r.seconds <= copied.seconds * (1 + 1e-9));
    optimal += r.status == remat::status::optimal;
    better += !copied.found() || r.seconds < copied.seconds * (1 - 1e-9);
  }
  CAPTURE(found, missed, optimal, better);
  CHECK(found > 350);
  CHECK(optimal > 50);
  CHECK(better > 40);
}
