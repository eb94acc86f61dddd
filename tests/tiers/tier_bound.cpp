// SPDX-License-Identifier: Apache-2.0
// Bounds for several tiers: never above a valid schedule, and equal to values worked out by hand.
#include <catch2/catch.hpp>

#include <limits>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <remat/copies/schedule_copies.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/solver/offmate.hpp>
#include <remat/tiers/tier_bound.hpp>

#include "../tiers_walk.hpp"

using remat::bytes_t;
using remat::problem;
using remat::value_id;
using remat::testing::chance;
using remat::testing::no_hurry;
using remat::testing::plannable_problem;
using remat::testing::with_some_budgets;

TEST_CASE("no valid schedule on several tiers is faster than tier_bound") {
  std::mt19937_64 g(31);
  int compared = 0, met = 0, tight = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto p = with_some_budgets(g, plannable_problem(g, round % 2 == 0), 70, 5, 30);
    auto s = remat::testing::tiers_walk(g, p).run();
    if (chance(g, 50))
      if (auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), remat::bounds_without_search(p).budget,
                                                     {.frugal = true, .small = 0}))
        s = std::move(laid->schedule);
    const auto valid = remat::testing::evaluated(p, s);
    if (!valid) continue;
    const auto& e = *valid;
    INFO("round " << round);
    std::vector<std::optional<bytes_t>> peaks(e.peaks.begin(), e.peaks.end());
    peaks[remat::device_tier].reset();
    const auto bound = remat::tiers::tier_bound(remat::testing::with_budgets(p, peaks), e.peak);
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

TEST_CASE("budgets of the largest 64-bit number are treated like budgets that hold everything") {
  std::mt19937_64 g(8);
  int compared = 0;
  for (int round = 0; round < 300; ++round) {
    const auto p = plannable_problem(g, round % 2 == 0);
    const auto with = [&](bytes_t budget) {
      std::vector<std::optional<bytes_t>> budgets(p.tiers().size(), budget);
      budgets[remat::device_tier].reset();
      const auto q = remat::testing::with_budgets(p, budgets);
      return std::pair(remat::tiers::tier_bound(q, budget), remat::solve(q, budget, remat::offload_only(), no_hurry));
    };
    const auto [bound, enough] = with(remat::max_bytes);
    const auto [same_bound, most] = with(std::numeric_limits<bytes_t>::max());
    INFO("round " << round);
    CHECK(bound == same_bound);
    REQUIRE(enough.status == most.status);
    if (!most.found()) continue;
    CHECK(enough.seconds == most.seconds);
    CHECK(most.budget == std::numeric_limits<bytes_t>::max());
    ++compared;
  }
  CHECK(compared > 100);
}

TEST_CASE("tier_bound counts weights that do not fit twice, as worked out by hand") {
  for (const bool frozen : {false, true}) {
    std::vector<remat::value> values;
    for (int i = 0; i < 3; ++i) values.push_back({.name = "w", .bytes = 10, .held = frozen, .starts = remat::testing::host});
    std::vector<remat::operation> operations;
    for (value_id w : {0, 1, 2, 2, 1, 0}) {
      std::vector<value_id> inputs = {w};
      if (!operations.empty()) inputs.push_back(values.size() - 1);
      values.push_back({"then", 0});
      operations.push_back({.name = "", .inputs = inputs, .outputs = {values.size() - 1}, .seconds = 1});
    }
    const problem p("weights", values, operations, {8}, remat::copy_rates{1, 1, 0});
    // There is room for one weight: the first two come again, 10 s each.
    CHECK(remat::tiers::tier_bound(p, 10) >= 50 * (1 - 1e-9));
    const auto r = remat::solve(p, 10, remat::offmate<>(), no_hurry);
    REQUIRE(r.found());
    CHECK(r.seconds == Approx(56));
    // With room for two, one weight comes again; with room for three, none.
    CHECK(remat::tiers::tier_bound(p, 20) == Approx(40));
    CHECK(remat::tiers::tier_bound(p, 30) == Approx(34));
  }
}

TEST_CASE("tier_bound: tiers are empty between steps, as worked out by hand") {
  // Two weights on a disk; each takes 4 s to the host and 2 s to the device. The device replaces both. The second operation
  // starts after both have been read (8 s), and the new weights take 4 s each to the disk.
  using remat::testing::disk;
  std::vector<remat::value> values;
  for (int i = 0; i < 2; ++i) values.push_back({.name = "w", .bytes = 4, .starts = disk});
  for (int i = 0; i < 2; ++i) values.push_back({.name = "w'", .bytes = 4, .ends = disk});
  values.push_back({"loss", 0});
  const std::vector<remat::operation> operations = {
      {.name = "forward", .inputs = {0, 1}, .outputs = {4}, .seconds = 1},
      {.name = "update", .inputs = {0, 4}, .outputs = {2}, .seconds = 1, .overwrites = {{2, 0}}},
      {.name = "update", .inputs = {1, 4}, .outputs = {3}, .seconds = 1, .overwrites = {{3, 1}}}};
  const problem p("steps", values, operations, {2, 3}, remat::copy_rates{2, 2, 0}, std::nullopt,
                  {{{"device"}, {"host"}, {"disk"}}, {{1, 2, 1}, {2, 1, 1}}}, {{2, 0}, {3, 1}});
  // Both weights are read, the second goes on to the device, the first two operations run, and both new weights are sent.
  CHECK(remat::tiers::tier_bound(p, 100) == Approx(8 + 2 + 1 + 1 + 2 + 8));
  const auto r = remat::solve(p, 100, remat::offmate<>(), no_hurry);
  REQUIRE(r.found());
  CHECK(r.status == remat::status::optimal);
}

TEST_CASE("tier_bound adds the time before the first computation to the time of copies, as worked out by hand") {
  // A weight arrives on the device in 5 s. Then three values of 10 bytes are made, and read in the opposite order.
  std::vector<remat::value> values = {{.name = "w", .bytes = 5, .starts = remat::testing::host}, {"begun", 0}};
  std::vector<remat::operation> operations = {{.name = "begin", .inputs = {0}, .outputs = {1}, .seconds = 1, .once = true}};
  std::vector<value_id> made;
  const auto add = [&](std::vector<value_id> inputs, bytes_t bytes) {
    inputs.push_back(operations.back().outputs.back());
    values.push_back({"made", bytes});
    values.push_back({"then", 0});
    operations.push_back(
        {.name = "", .inputs = inputs, .outputs = {values.size() - 2, values.size() - 1}, .seconds = 1, .once = true});
    return value_id(values.size() - 2);
  };
  for (int i = 0; i < 3; ++i) made.push_back(add({}, 10));
  for (int i = 3; i-- > 0;) add({made[static_cast<std::size_t>(i)]}, 0);
  const problem p("wait", values, operations, {values.size() - 1}, remat::copy_rates{10, 1, 0});
  // While the third value is read, one more fits. The other comes back in 10 s, after 5 + 1 + 3 s.
  CHECK(remat::tiers::tier_bound(p, 20) >= 19 * (1 - 1e-9));
  const auto r = remat::solve(p, 20, remat::offmate<>(), no_hurry);
  REQUIRE(r.found());
  CHECK(r.seconds <= 21 * (1 + 1e-9));
}

TEST_CASE("bounds for several tiers stop when told to, and return what is proven so far") {
  std::mt19937_64 g(37);
  int more = 0;
  for (int round = 0; round < 200; ++round) {
    const auto p = plannable_problem(g, round % 2 == 0);
    CHECK(remat::tiers::tier_bound(p, 30, [] { return true; }) == remat::bounds_without_search(p).seconds);
    more += remat::tiers::tier_bound(p, 30) > remat::bounds_without_search(p).seconds;
  }
  CHECK(more > 20);
}

TEST_CASE("tier_bound asks whether to stop for each copy of a value that an operation makes") {
  constexpr int count = 200;
  std::vector<remat::value> values = {{.name = "x", .bytes = 1, .starts = remat::testing::host}};
  std::vector<remat::operation> operations;
  std::vector<value_id> targets;
  for (int i = 0; i < count; ++i) {  // the device makes gradients, and the host updates weights with them
    const auto last = value_id(operations.empty() ? 0 : values.size() - 2);
    values.push_back({"gradient", 1});
    values.push_back({.name = "weight", .bytes = 1, .ends = remat::testing::host});
    operations.push_back({.name = "step", .inputs = {last}, .outputs = {values.size() - 2}, .seconds = 1});
    operations.push_back({.name = "update",
                          .inputs = {values.size() - 2},
                          .outputs = {values.size() - 1},
                          .seconds = 1,
                          .on = remat::testing::host});
    targets.push_back(values.size() - 1);
  }
  const problem p("updates", values, operations, targets, remat::copy_rates{1, 1, 0});
  int asked = 0;
  remat::tiers::tier_bound(p, 1000, [&] { return ++asked == 0; });
  CHECK(asked > count);
}
