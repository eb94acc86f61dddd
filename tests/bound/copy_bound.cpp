// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <remat/bound/copy_bound.hpp>
#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/tier_oracle.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using remat::bytes_t;
using remat::problem;
using remat::testing::share_of_peak;
using remat::testing::uniform;

namespace {

/// @param fixed every `fixed`-th value may not be copied; 0: all values may be copied
problem copied_by(const problem& p, remat::copy_rates link, std::size_t fixed = 0) {
  auto values = p.values();
  for (std::size_t v = 0; fixed > 0 && v < values.size(); ++v) values[v].movable = v % fixed != 0;
  return problem(p.name(), std::move(values), p.operations(), p.targets(), link, p.backward_start());
}

}  // namespace

TEST_CASE("copy_bound is never above the optimum") {
  std::mt19937_64 g(8);
  int compared = 0, slower = 0;
  double covered = 0;
  for (int round = 0; round < remat::testing::shortened(2500); ++round) {
    const auto chain = round % 3 == 2;
    const auto plain = chain ? remat::testing::random_training_chain(g, static_cast<std::size_t>(uniform(g, 1, 2)))
                             : remat::testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 5)),
                                                                  .sources = 1,
                                                                  .outputs = static_cast<std::size_t>(uniform(g, 1, 2)),
                                                                  .once = round % 2 == 0 ? 40 : 0});
    if (plain.values().size() > 8) continue;
    const auto rate = [&] { return 0.5 * static_cast<double>(uniform(g, 1, 8)); };
    const auto p = copied_by(plain, {rate(), rate(), 0.5 * static_cast<double>(uniform(g, 0, 1))}, round % 4 == 3 ? 2 : 0);
    const auto least = remat::bounds_without_search(p), all = remat::bounds_without_search(plain);
    const auto budget = uniform(g, least.budget, std::max(least.budget, share_of_peak(p, 1) - 1));
    const auto optimum = remat::testing::exhaustive_optimum_on_tiers(p, budget, 4'000);
    if (!optimum) continue;
    INFO("round " << round << ", budget " << budget);
    const double bound = remat::bound::copy_bound(p, budget);
    REQUIRE(bound <= optimum->seconds + 1e-5);
    if (round % 4 == 3 && !std::isfinite(optimum->seconds)) continue;
    REQUIRE(std::isfinite(optimum->seconds));
    REQUIRE(bound >= all.seconds);
    ++compared;
    if (optimum->seconds > all.seconds + 1e-5) ++slower, covered += (bound - all.seconds) / (optimum->seconds - all.seconds);
  }
  CAPTURE(compared, slower, covered);
  CHECK(compared > remat::testing::shortened(800));
  CHECK(covered > 0.01 * slower);
}

TEST_CASE("copy_bound with a slow link equals min_cut_bound, with a fast link the time of store-all") {
  for (const std::size_t layers : {2u, 5u}) {
    const auto p = remat::testing::transformer_training_graph(layers);
    for (const double part : {0.9, 0.75, 0.6}) {
      const auto budget = share_of_peak(p, part);
      const double alone = remat::bound::min_cut_bound(p, budget).seconds;
      if (!std::isfinite(alone)) continue;
      INFO(layers << " layers, " << part);
      CHECK(remat::bound::copy_bound(copied_by(p, {1e-3, 1e-3, 0}), budget) == Approx(alone).epsilon(2e-3));
      CHECK(remat::bound::copy_bound(copied_by(p, {1e12, 1e12, 0}), budget) == Approx(p.total_seconds()));
      double before = alone * (1 + 1e-3);
      for (const double seconds : {8.0, 4.0, 2.0, 1.0, 0.5}) {  // to copy the excess out and back, relative to store-all
        const double rate = 2 * static_cast<double>(share_of_peak(p, 1) - budget) / (seconds * p.total_seconds());
        const double now = remat::bound::copy_bound(copied_by(p, {rate, rate, 0}), budget);
        CHECK(now <= before * (1 + 1e-3));
        before = now;
      }
    }
  }
}

TEST_CASE("copy_bound proves the time of copying a value that cannot be recomputed") {
  // a must leave the device for c, and only a copy can bring it back: out while b runs, in while d runs, 12 s each
  const problem p(
      "detour", {{"a", 4}, {"b", 2}, {"c", 3}, {"d", 2}, {"e", 1}},
      {{"a", {}, {0}, 1, 0, true}, {"b", {0}, {1}, 5}, {"c", {1}, {2}, 3, 4}, {"d", {2}, {3}, 2}, {"e", {0, 3}, {4}, 1}}, {4},
      remat::copy_rates{0.5, 0.5, 4});
  CHECK(remat::bound::copy_bound(p, 13) == 12);
  CHECK(remat::bound::copy_bound(p, 9) == Approx(12 + 12));
  CHECK(remat::bound::min_cut_bound(p, 9).seconds == remat::bound::copy_bound(p, 9));
  CHECK(std::isinf(remat::bound::min_cut_bound(p, 8).seconds));
}

TEST_CASE("copy_bound finds the best moment even if hundreds of other moments need more memory") {
  const auto plain = remat::testing::instance("resnet50");
  const double rate = 2 * static_cast<double>(share_of_peak(plain, 1) - plain.held_bytes()) / plain.total_seconds();
  const auto p = copied_by(plain, {rate, rate, 1e-5});
  const auto budget = share_of_peak(p, .2);
  const double most = remat::bound::copy_bound(p, budget, {.moments = 10'000, .refined = 1'000});
  CHECK(most > 1.0025 * p.total_seconds());
  CHECK(remat::bound::copy_bound(p, budget) == Approx(most).epsilon(1e-4));
  CHECK(remat::bound::copy_bound(p, budget, {.moments = 1, .refined = 1, .cuts = 1}) <= most);
}

TEST_CASE("copy_bound names options that are out of range") {
  const problem p("one", {{"a", 1}}, {{"a", {}, {0}, 1}}, {0}, remat::copy_rates{1, 1, 0});
  CHECK_THROWS_WITH(remat::bound::copy_bound(p, 9, {.moments = 0}), Catch::Contains("moments"));
  CHECK_THROWS_WITH(remat::bound::copy_bound(p, 9, {.refined = 0}), Catch::Contains("refined"));
  CHECK_THROWS_WITH(remat::bound::copy_bound(p, 9, {.cuts = 0}), Catch::Contains("cuts"));
  CHECK_THROWS_WITH(remat::bound::copy_bound(problem("one", p.values(), p.operations(), {0}), 9), Catch::Contains("no copies"));
}
