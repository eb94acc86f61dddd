// SPDX-License-Identifier: Apache-2.0
// The lower bound against exhaustive search, and against known values on captured networks.
#include <catch2/catch.hpp>

#include <cmath>
#include <random>

#include <remat/bound/copy_bound.hpp>
#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

namespace {

struct tally {
  int compared = 0, positive = 0;
  double extra = 0, optimal_extra = 0;
};

/// Compares bound and optimum at budgets from the peak of store-all downwards, until no schedule fits.
void compare(const problem& p, bytes_t step, tally& t) {
  const auto all = evaluate(p, store_all_schedule(p));
  for (auto budget = all.peak;; budget -= step) {
    const auto bound = bound::min_cut_bound(p, budget);
    const auto best = exhaustive_optimum(p, budget);
    INFO("budget " << budget);
    if (!best) {
      CHECK(bound::min_cut_bound(p, all.peak).budget <= budget + step);  // which a schedule fits
      break;
    }
    REQUIRE(bound.budget <= budget);
    REQUIRE(bound.seconds <= *best + 1e-9);
    const auto least = bounds_without_search(p).seconds;
    ++t.compared;
    t.positive += bound.seconds > least;
    t.extra += bound.seconds - least;
    t.optimal_extra += *best - least;
  }
}

}  // namespace

TEST_CASE("min_cut_bound is never above the optimum of random problems") {
  std::mt19937_64 g(7);
  tally t;
  for (int round = 0; round < shortened(1000); ++round)
    compare(random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 4, 7)), .once = round % 3 == 0 ? 25 : 0}), 2, t);
  CHECK(t.compared > shortened(2000));
  CHECK(t.positive > shortened(300));
  CHECK(t.extra > 0.2 * t.optimal_extra);
}

TEST_CASE("min_cut_bound is never above the optimum of training chains") {
  std::mt19937_64 g(8);
  tally t;
  for (int round = 0; round < shortened(40); ++round) compare(random_training_chain(g, 3), 2, t);
  for (std::size_t n = 2; n <= 6; ++n) compare(unit_training_chain(n), 1, t);
  CHECK(t.positive > shortened(100));
  CHECK(t.extra > 0.4 * t.optimal_extra);
}

TEST_CASE("min_cut_bound is never above the optimum if costs are denormal numbers") {
  std::mt19937_64 g(9);
  int extra = 0;
  for (int round = 0; round < shortened(300); ++round) {
    const auto whole = random_problem(g, {.operations = 7});
    std::vector<double> seconds;
    for (const auto& o : whole.operations()) seconds.push_back(o.seconds * 0x1p-1060);
    const auto p = whole.with_costs(seconds);
    const auto least = bounds_without_search(p);
    for (auto budget = least.budget; budget < measure_store_all(p).peak; budget += 3)
      if (const auto optimum = exhaustive_optimum(p, budget)) {
        const auto bound = bound::min_cut_bound(p, budget).seconds;
        REQUIRE(bound <= *optimum);
        extra += bound > least.seconds;
      }
  }
  CHECK(extra > shortened(50));
}

TEST_CASE("min_cut_bound: the value of a once-only operation must be retained") {
  // big -> (small) -> loss; the backward reads big again.
  for (bool once : {false, true}) {
    const problem p("p", {{"x", 1, true}, {"big", 10, false}, {"small", 1, false}, {"loss", 10, false}, {"out", 1, false}},
                    {{"a", {0}, {1}, 5, 0, once}, {"b", {1}, {2}, 1}, {"c", {2}, {3}, 1}, {"d", {1, 3}, {4}, 1}}, {4});
    const auto least = bound::min_cut_bound(p, 23);
    CHECK(least.budget == 22);  // held, big, loss, out
    const auto tight = bound::min_cut_bound(p, 22);
    CHECK(tight.seconds <= *exhaustive_optimum(p, 22));
  }
}

TEST_CASE("min_cut_bound is copy_bound for the time and the trivial bound for the budget if copies are allowed") {
  const auto chain = unit_training_chain(6);
  CHECK(bound::min_cut_bound(chain, 5).seconds > 13);
  for (const double rate : {1.0, 0.1}) {
    const auto p = chain.with_copies(copy_rates{rate, rate, 0});
    const auto bound = bound::min_cut_bound(p, 5);
    CHECK(bound.seconds == bound::copy_bound(p, 5));
    CHECK((bound.seconds > 13) == (rate < 1));
    CHECK(bound.budget == bounds_without_search(p).budget);
  }
}

TEST_CASE("min_cut_bound keeps its known values on captured networks") {
  // Extra time in % of store-all, at budgets of 0.8, 0.6, 0.5 and 0.4 of the peak of store-all above the held bytes.
  struct row {
    const char* name;
    double extra[4];
  };
  for (const auto& r : {row{"llama-layers-24-d-1024", {2.00, 5.44, 8.32, 11.3}}, row{"gpt2-layers-12", {2.63, 5.92, 8.34, 12.6}},
                        row{"gpt2-layers-2-seq-256", {3.05, 8.07, 13.7, 21.5}}, row{"resnet18", {2.21, 7.62, 10.7, 38.1}},
                        row{"unet-depth-4", {3.60, 8.97, 12.5, 16.3}}, row{"resnet50", {2.05, 6.04, 9.67, 14.4}},
                        row{"mobilenet-v3-small", {1.37, 4.42, 6.48, 8.65}}}) {
    const auto p = instance(r.name);
    const auto all = evaluate(p, store_all_schedule(p));
    const double fractions[] = {.8, .6, .5, .4};
    for (int i = 0; i < 4; ++i) {
      const auto budget = p.held_bytes() + static_cast<bytes_t>(fractions[i] * static_cast<double>(all.peak - p.held_bytes()));
      const auto extra = 100 * (bound::min_cut_bound(p, budget).seconds / all.seconds - 1);
      INFO(r.name << " at " << fractions[i] << ": " << extra << " %, known " << r.extra[i] << " %");
      CHECK(extra >= r.extra[i] - 0.06);
    }
  }
}

TEST_CASE("min_cut_bound names options that are out of range") {
  const auto p = unit_training_chain(3);
  CHECK_THROWS_WITH(bound::min_cut_bound(p, 5, {.moments = 0}), Catch::Contains("moments"));
  CHECK_THROWS_WITH(bound::min_cut_bound(p, 5, {.refined = 0}), Catch::Contains("refined"));
}

TEST_CASE("minimum cuts through two hundred large once-only values neither overflow nor lose small costs") {
  constexpr index_t n = 200;
  std::vector<value> values = {{"s", 8}};
  std::vector<operation> ops = {{"s", {}, {0}, 3}};
  for (index_t i = 0; i < n; ++i) {
    values.push_back({"m", bytes_t{4} << 40});
    ops.push_back({"m", {}, {i + 1}, 1e-3, 0, true});
  }
  std::vector<value_id> all;
  for (index_t v = 0; v <= n; ++v) all.emplace_back(v);
  values.push_back({"x", 8}), ops.push_back({"x", all, {n + 1}, 1});
  values.push_back({"big", bytes_t{64} << 40}), ops.push_back({"big", {n + 1}, {n + 2}, 1});
  all.emplace_back(n + 2);
  values.push_back({"e", 8}), ops.push_back({"e", all, {n + 3}, 1});
  const problem p("large", values, ops, {n + 3});
  bound::retention_cut cut(p, needed_operations(p), operation_id(n + 2));
  const auto list = cut.breakpoints(16);
  REQUIRE(list.size() == 2);  // with the first value, or without it
  CHECK(list[0].bytes - list[1].bytes == 8);
  CHECK(list[1].seconds == 3);
  CHECK(cut.minimum(1e-20).seconds == 0);
  const auto c = cut.minimum(1);  // a price at which the capacities are a multiple of the sum of all costs
  CHECK(c.seconds == 3);
  CHECK(c.error >= 0);
}

TEST_CASE("minimum cuts stop when they are interrupted") {
  std::size_t polls = 0;
  const auto p = testing::unit_training_chain(3000);
  const auto needed = needed_operations(p);
  bound::retention_cut cut(p, needed, needed[needed.size() / 2], nullptr, [&] { return ++polls > 0; });
  CHECK_THROWS_AS(cut.retain_least(), bound::interrupted);
  CHECK(polls == 1);
  CHECK(cut.breakpoints(16).size() == 1);
  const auto budget = testing::share_of_peak(p, 0.5);
  CHECK(bound::min_cut_bound(p, budget, {}, [] { return true; }).seconds == Approx(bounds_without_search(p).seconds));
}
