// SPDX-License-Identifier: Apache-2.0
// Copies for steps on several tiers, worked out by hand.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <remat/copies/copy_search.hpp>
#include <remat/copies/early_copies.hpp>
#include <remat/copies/schedule_copies.hpp>
#include <remat/copies/virtual_problem.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/result.hpp>

#include "../tiers.hpp"

using remat::bytes_t;
using remat::problem;
using remat::value_id;
using remat::testing::chance;
using remat::testing::disk;
using remat::testing::host;
using remat::testing::uniform;

TEST_CASE("schedule_copies plans alike for links in full and for rates in the short form") {
  std::mt19937_64 g(23);
  int copied = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto made = remat::testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 1, 20)), .once = 10});
    const double up = static_cast<double>(uniform(g, 1, 8)) / 2, down = static_cast<double>(uniform(g, 1, 8)) / 2;
    const auto shortly = made.with_copies(remat::copy_rates{up, down, 0.5});
    const problem fully(made.name(), made.values(), made.operations(), made.targets(), std::nullopt, std::nullopt,
                        {{}, {{remat::device_tier, host, up, 0.5, "up"}, {host, remat::device_tier, down, 0.5, "down"}}});
    REQUIRE((shortly.plain() && !fully.plain()));
    const auto order = remat::needed_operations(made);
    const auto least = remat::bounds_without_search(made).budget;
    const auto budget = uniform(g, least, std::max(least, remat::measure_order(made, order).peak));
    for (const bool frugal : {false, true}) {
      const auto a = remat::copies::schedule_copies(shortly, order, budget, {.frugal = frugal, .small = 0}),
                 b = remat::copies::schedule_copies(fully, order, budget, {.frugal = frugal, .small = 0});
      INFO("round " << round);
      REQUIRE((a && b));
      REQUIRE(a->schedule == b->schedule);
      REQUIRE(a->seconds == b->seconds);
      copied += remat::has_copies(a->schedule);
    }
  }
  CHECK(copied > 500);
}

TEST_CASE("schedule_copies on two tiers gives the plan of a step worked out by hand") {
  remat::testing::step_parts x;
  const auto order = std::vector<remat::operation_id>{0, 1};
  const auto once = remat::copies::schedule_copies(x.build(), order, 20);
  REQUIRE(once);
  CHECK(once->schedule == remat::schedule{{{remat::action::prefetch, 0},
                                           {remat::action::compute, 0},
                                           {remat::action::drop, 0},
                                           {remat::action::offload, 1},
                                           {remat::action::compute, 1},
                                           {remat::action::drop, 1},
                                           {remat::action::drop, 1, host}},
                                          {}});
  CHECK(remat::evaluate(x.build(), once->schedule).seconds == 9);
  CHECK_FALSE(remat::copies::schedule_copies(x.build(), order, 19));
  x.system.tiers = {{"device"}, {"host", 19}};
  CHECK_FALSE(remat::copies::schedule_copies(x.build(), order, 20));  // w and g
}

TEST_CASE("schedule_copies on two tiers orders copies and in-place updates") {
  // A weight of the device that the host updates in place: the weight goes to the host, and its successor comes back.
  const problem there("updated there", {{"w", 10}, {"w'", 10}},
                      {{.name = "update", .inputs = {0}, .outputs = {1}, .seconds = 1, .on = host, .overwrites = {{1, 0}}}}, {1},
                      remat::copy_rates{10, 10, 0}, std::nullopt, {}, {{1, 0}});
  const auto laid = remat::copies::schedule_copies(there, std::vector<remat::operation_id>{0}, 10);
  REQUIRE(laid);
  CHECK(remat::evaluate(there, laid->schedule).peaks == std::vector<bytes_t>{10, 10});
  // A weight that the host reads before the device updates it: the update waits for the copy.
  const problem here("updated here", {{"w", 10}, {.name = "norm", .bytes = 1, .ends = host}, {"w'", 10}},
                     {{.name = "norm", .inputs = {0}, .outputs = {1}, .seconds = 1, .on = host},
                      {.name = "update", .inputs = {0}, .outputs = {2}, .seconds = 4, .overwrites = {{2, 0}}}},
                     {1, 2}, remat::copy_rates{10, 10, 0});
  const auto waits = remat::copies::schedule_copies(here, std::vector<remat::operation_id>{0, 1}, 20);
  REQUIRE(waits);
  CHECK(waits->seconds == 5);
  CHECK(remat::evaluate(here, waits->schedule).seconds == 5);
  // The update comes after all readers of the weight, and runs once.
  const problem late("late", {{"w", 10}, {"w'", 10}, {"y", 1}},
                     {{.name = "update", .inputs = {0}, .outputs = {1}, .overwrites = {{1, 0}}},
                      {.name = "reader", .inputs = {0}, .outputs = {2}}},
                     {1, 2}, remat::copy_rates{10, 10, 0});
  CHECK(remat::copies::readers_before_overwrites(late, std::vector<remat::operation_id>{0, 1, 0}) ==
        std::vector<remat::operation_id>{1, 0});
}

TEST_CASE("schedule_copies on two tiers keeps weights that may start anywhere on the device while there is room") {
  // Four weights of 10 bytes whose updates run on the device in place: nothing has to move if all four fit.
  std::vector<remat::value> values;
  std::vector<remat::operation> operations;
  std::vector<remat::carry> next;
  for (value_id l = 0; l < 4; ++l) values.push_back({.name = "w", .bytes = 10, .starts = remat::any_tier});
  for (value_id l = 0; l < 4; ++l) {
    values.push_back({.name = "w'", .bytes = 10, .ends = remat::any_tier});
    operations.push_back({.name = "update", .inputs = {l}, .outputs = {l + 4}, .seconds = 1, .overwrites = {{l + 4, l}}});
    next.push_back({l + 4, l});
  }
  const problem p("anywhere", values, operations, {4, 5, 6, 7}, remat::copy_rates{10, 10, 0}, std::nullopt, {}, next);
  const auto copies = [&](bytes_t budget) {
    const auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), budget, {.small = 0});
    REQUIRE(laid);
    const auto e = remat::evaluate(p, laid->schedule);
    REQUIRE(e.peak <= budget);
    return e.copies.size();
  };
  CHECK(copies(40) == 0);
  CHECK(copies(30) > 0);
  CHECK(copies(30) < copies(20));
}

TEST_CASE("schedule_copies in repeated steps keeps a source that only the device reads on the device if it fits") {
  const std::vector<remat::value> values = {
      {.name = "frozen", .bytes = 4, .starts = remat::any_tier}, {"x", 1}, {"x'", 1}, {.name = "next", .bytes = 1}};
  const std::vector<remat::operation> operations = {{.name = "", .inputs = {0, 1}, .outputs = {2}, .seconds = 1},
                                                    {.name = "", .inputs = {2}, .outputs = {3}, .seconds = 1, .workspace = 2}};
  const problem p("frozen", values, operations, {3}, remat::copy_rates{1, 1, 0}, std::nullopt, {}, {{3, 1}});
  for (const bytes_t budget : {8, 6}) {  // the second operation needs 4 more bytes
    const auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), budget);
    REQUIRE(laid);
    const auto e = remat::evaluate(p, laid->schedule);
    CHECK(e.peak <= budget);
    CHECK(laid->schedule.starts == std::vector<remat::start_place>{{0, budget == 8 ? remat::device_tier : host}});
    CHECK(e.seconds == Approx(budget == 8 ? 2 : 6));
  }
}

TEST_CASE("schedule_copies in repeated steps starts only the first weight on the device") {
  const remat::index_t layers = 4;
  std::vector<remat::value> values;
  for (remat::index_t l = 0; l < layers; ++l)
    values.push_back({.name = "w", .bytes = 10, .held = true, .starts = remat::any_tier});
  for (remat::index_t l = 0; l <= 2 * layers; ++l) values.push_back({.name = "x", .bytes = 1});
  std::vector<remat::operation> operations;
  for (remat::index_t i = 0; i < 2 * layers; ++i) {
    const value_id weight(i < layers ? i : 2 * layers - 1 - i), read(layers + i), made(layers + i + 1);
    operations.push_back({.name = "layer", .inputs = {weight, read}, .outputs = {made}, .seconds = 2});
  }
  const value_id first(layers), last(3 * layers);
  const problem p("step", values, operations, {last}, remat::copy_rates{10, 10, 0}, std::nullopt, {}, {{last, first}});
  const auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), 34);  // three weights
  REQUIRE(laid);
  CHECK(remat::evaluate(p, laid->schedule).seconds == Approx(16));  // one second more if the first weight had to arrive
  for (const auto& [v, tier] : laid->schedule.starts) CHECK(tier == (v == 0 ? remat::device_tier : host));
}

TEST_CASE("why_unplannable names what cannot be planned") {
  using remat::copies::why_unplannable;
  remat::testing::step_parts x;
  CHECK(why_unplannable(x.build()).empty());
  const auto refusal = [&](const auto& change) {
    auto y = x;
    change(y);
    return why_unplannable(y.build());
  };
  CHECK(refusal([](auto& y) { y.system.tiers = {{"device"}, {"host"}, {"disk"}}; }).empty());
  CHECK(refusal([](auto& y) {
          y.system = {{{"device"}, {"host"}, {"disk"}}, {{host, disk, 1}, {remat::device_tier, disk, 1}}};
          y.values[0].starts = y.values[2].ends = disk;
        }) == "values[0].starts: the disk is on no chain of tiers that are linked both ways (device, host)");
  CHECK(refusal([](auto& y) {
          y.copies.reset();
          y.system.links = {{host, remat::device_tier, 1}};
        }) == "links: none from the device to the host");
  CHECK(refusal([](auto& y) { y.values[1].movable = false; }) ==
        "values[1].movable: it may not be copied, and is read on another tier");
  CHECK(refusal([](auto& y) {
          y.next.clear();
          y.targets.push_back(0);
          y.values[0].ends = host;
        }) == "values[0]: an operation overwrites it, and it must be there at the end");
  CHECK(refusal([](auto& y) {
          y.values.push_back({.name = "late", .bytes = 1, .ends = host});
          y.operations.push_back({.name = "reader", .inputs = {0, 2}, .outputs = {3}, .on = host});
          y.targets.push_back(3);
        }) == "operations: one reads what another overwrites, and comes after it");
  x.system = {{{"device"}, {"host"}}, {{host, remat::device_tier, 1}}};
  x.copies.reset();
  CHECK_THROWS_WITH(remat::copies::schedule_copies(x.build(), std::vector<remat::operation_id>{0, 1}, 20),
                    "schedule_copies: links: none from the device to the host");
}
