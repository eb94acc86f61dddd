// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <vector>

#include <remat/copies/schedule_copies.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/tier_oracle.hpp>

using remat::bytes_t;
using remat::problem;
using remat::testing::chance;
using remat::testing::uniform;

namespace {

/// A valid order with recomputations: some operations run a second time later.
std::vector<remat::operation_id> order_with_repeats(std::mt19937_64& g, const problem& p) {
  auto order = remat::needed_operations(p);
  const auto first = order;
  for (std::size_t k = 0; k < first.size(); ++k)
    if (!p.operations()[first[k]].once && chance(g, 40)) {
      const auto made = std::find(order.begin(), order.end(), first[k]) - order.begin();
      order.insert(order.begin() + uniform(g, made + 1, static_cast<std::int64_t>(order.size())), first[k]);
    }
  return order;
}

}  // namespace

TEST_CASE("schedule_copies returns valid schedules within the budget, for random orders and budgets") {
  std::mt19937_64 g(4);
  for (int round = 0; round < 3000; ++round) {
    const auto chain = round % 4 == 3;
    const auto plain = chain ? remat::testing::random_training_chain(g, static_cast<std::size_t>(uniform(g, 1, 12)))
                             : remat::testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 1, 30)),
                                                                  .once = round % 3 == 0 ? 30 : 0});
    const auto p = plain.with_copies(remat::copy_rates{0.5 * static_cast<double>(uniform(g, 1, 8)),
                                                       0.5 * static_cast<double>(uniform(g, 1, 8)),
                                                       0.5 * static_cast<double>(uniform(g, 0, 2))});
    const auto order = round % 2 == 0 ? remat::needed_operations(p) : order_with_repeats(g, p);
    const auto least = remat::bounds_without_search(p).budget;
    const auto needs = remat::measure_order(p, order);
    std::vector<remat::copies::departure> departures;
    if (round % 3 == 2)
      for (std::size_t v = 0; v < p.values().size(); ++v)
        departures.push_back(chance(g, 30) ? remat::copies::departure::first : remat::copies::departure::in_turn);
    for (const auto budget : {least - 1, least, uniform(g, least, std::max(least, needs.peak)), needs.peak})
      for (const bool frugal : {false, true}) {
        INFO("round " << round << ", budget " << budget << ", frugal " << frugal);
        const auto laid = remat::copies::schedule_copies(
            p, order, budget, {.frugal = frugal, .small = round % 5 == 0 ? 0.2 : 0, .departures = departures});
        REQUIRE(laid.has_value() == (budget >= least));
        if (!laid) continue;
        const auto e = remat::evaluate(p, laid->schedule);
        REQUIRE(e.peak <= budget);
        REQUIRE(e.seconds <= laid->seconds * (1 + 1e-12));
        REQUIRE(remat::compute_order(laid->schedule) == order);
        double waits = 0;
        for (const auto& w : laid->waits) waits += w.seconds;
        REQUIRE(needs.seconds + waits == Approx(laid->seconds));
        if (budget >= needs.peak) {
          REQUIRE(e.copies.empty());
          REQUIRE(e.seconds == Approx(needs.seconds));
        }
      }
  }
}

TEST_CASE("schedule_copies does not copy values that may not be copied") {
  std::mt19937_64 g(9);
  int found = 0, absent = 0;
  for (int round = 0; round < 500; ++round) {
    const auto chain = remat::testing::random_training_chain(g, static_cast<std::size_t>(uniform(g, 2, 12)));
    auto values = chain.values();
    for (auto& v : values) v.movable = uniform(g, 0, 4) > 0;
    const problem p("fixed", std::move(values), chain.operations(), chain.targets(), remat::copy_rates{1, 1, 0.5});
    const auto order = remat::needed_operations(p);
    const auto budget = uniform(g, remat::bounds_without_search(p).budget, remat::measure_order(p, order).peak);
    const auto laid = remat::copies::schedule_copies(p, order, budget);
    laid ? ++found : ++absent;
    if (laid) REQUIRE(remat::evaluate(p, laid->schedule).peak <= budget);  // evaluate checks which values may be copied
    std::vector<remat::copies::departure> departures;
    for (const auto& v : p.values())
      departures.push_back(v.movable ? remat::copies::departure::in_turn : remat::copies::departure::never);
    const auto kept = remat::copies::schedule_copies(chain.with_copies(p.copies()), order, budget, {.departures = departures});
    REQUIRE(kept.has_value() == laid.has_value());
    if (kept) REQUIRE(kept->schedule.steps == laid->schedule.steps);
  }
  CAPTURE(found, absent);
  CHECK(std::min(found, absent) > 50);
}

TEST_CASE("schedule_copies is never faster than the optimum, and often as fast") {
  std::mt19937_64 g(6);
  int compared = 0, met = 0;
  for (int round = 0; round < 1500; ++round) {
    const auto plain =
        remat::testing::random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 4)), .sources = 1, .outputs = 1});
    const auto p = plain.with_copies(remat::copy_rates{2, 2, 0.5 * static_cast<double>(uniform(g, 0, 1))});
    const auto order = remat::needed_operations(p);
    const auto peak = remat::measure_order(p, order).peak;
    const auto budget = uniform(g, remat::bounds_without_search(p).budget, peak);
    if (budget == peak) continue;
    const auto optimum = remat::testing::exhaustive_optimum_on_tiers(p, budget, 20'000);
    if (!optimum) continue;
    const auto laid = remat::copies::schedule_copies(p, order, budget, {.small = 0});
    INFO("round " << round);
    REQUIRE(laid.has_value());
    const auto seconds = remat::evaluate(p, laid->schedule).seconds;
    REQUIRE(seconds >= optimum->seconds - 1e-6);
    ++compared;
    met += seconds <= optimum->seconds + 1e-6;
  }
  CAPTURE(compared, met);
  CHECK(compared > 50);
  CHECK(4 * met > compared);
}

TEST_CASE("schedule_copies sends an idle value to the host and brings it back in time") {
  // a is needed at both ends of the chain b, c, d, and does not fit beside the workspace of c
  const problem p("detour", {{"a", 4}, {"b", 2}, {"c", 3}, {"d", 2}, {"e", 1}},
                  {{"a", {}, {0}, 1}, {"b", {0}, {1}, 9}, {"c", {1}, {2}, 9, 4}, {"d", {2}, {3}, 9}, {"e", {0, 3}, {4}, 1}}, {4},
                  remat::copy_rates{1, 1, 0.5});
  const auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), 9);
  REQUIRE(laid.has_value());
  CHECK(laid->waits.empty());
  CHECK(remat::evaluate(p, laid->schedule).seconds == 29);
  CHECK(laid->schedule.steps[1] == remat::step{remat::action::offload, 0});
}

TEST_CASE("schedule_copies sends a value marked to go first before a value that is used last") {
  // before d, whose workspace leaves no room for both, the link has time for only one of a and b
  const problem p("two", {{"a", 4}, {"b", 4}, {"c", 1}, {"d", 1}, {"e", 1}},
                  {{"a", {}, {0}, 0}, {"b", {}, {1}, 0}, {"c", {}, {2}, 4}, {"d", {2}, {3}, 20, 4}, {"e", {0, 1, 3}, {4}, 1}},
                  {4}, remat::copy_rates{1, 1, 0});
  for (remat::value_id first : {0, 1}) {
    std::vector<remat::copies::departure> departures(5, remat::copies::departure::in_turn);
    departures[first] = remat::copies::departure::first;
    const auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), 10, {.departures = departures});
    REQUIRE(laid.has_value());
    REQUIRE_FALSE(laid->to_host.empty());
    CHECK(laid->to_host[0].value == first);
    CHECK(remat::evaluate(p, laid->schedule).peak <= 10);
  }
}

TEST_CASE("schedule_copies names invalid orders and options") {
  const problem p("two", {{"a", 1}, {"b", 1}}, {{"a", {}, {0}, 1}, {"b", {0}, {1}, 1}}, {1}, remat::copy_rates{1, 1, 0});
  const std::vector<remat::operation_id> late = {1, 0};
  CHECK_THROWS_WITH(remat::copies::schedule_copies(p, late, 9), Catch::Contains("value 0"));
  const problem still("two", p.values(), p.operations(), p.targets());
  CHECK_THROWS_WITH(remat::copies::schedule_copies(still, late, 9), Catch::Contains("no copies"));
  CHECK_THROWS_WITH(remat::copies::schedule_copies(p, late, 9, {.small = 2}), Catch::Contains("copy_options.small"));
  CHECK_THROWS_WITH(remat::copies::schedule_copies(p, late, 9, {.departures = {remat::copies::departure::never}}),
                    Catch::Contains("copy_options.departures must say it of each of the 2 values, got 1"));
}

TEST_CASE("schedule_copies gives up a long order when told to stop, but not a short order") {
  const auto stopped = [](std::size_t layers, bool frugal) {
    const auto plain = remat::testing::training_chain(std::vector<remat::testing::layer>(layers));
    const auto p = plain.with_copies(remat::copy_rates{2, 2, 0});
    const auto budget = remat::measure_store_all(p).peak / 2;
    return !remat::copies::schedule_copies(p, remat::needed_operations(p), budget,
                                           {.frugal = frugal, .stop = [] { return true; }});
  };
  for (const bool frugal : {false, true}) {
    CHECK(stopped(10'000, frugal));
    CHECK_FALSE(stopped(5'000, frugal));
  }
}
