// SPDX-License-Identifier: Apache-2.0
// Orders with a lower peak, and the smallest budgets found with them.
#include <catch2/catch.hpp>

#include <random>
#include <string>

#include <remat/core/smallest_budget.hpp>
#include <remat/solver/lower_peak.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(warm_startable<min_cut>);

namespace {

/// `min_cut` that ignores start schedules.
struct cold_min_cut {
  std::string name() const { return "cold"; }
  result solve(const problem& p, bytes_t budget, monitor& m) const { return min_cut().solve(p, budget, m); }
};
static_assert(!warm_startable<cold_min_cut>);

problem any_problem(std::mt19937_64& g, int round) {
  if (round % 4 == 0) return random_training_chain(g, 3);
  return random_problem(g, {.operations = 8, .once = round % 4 == 1 ? 25 : 0, .target = round % 4 == 2 ? 50 : 15});
}

}  // namespace

TEST_CASE("lower_peak finds valid orders of lower peak, mostly down to the least that any schedule needs") {
  std::mt19937_64 g(31);
  int all = 0, least = 0, least_before = 0;
  for (int round = 0; round < shortened(600); ++round) {
    const auto p = any_problem(g, round);
    auto order = needed_operations(p);
    const auto before = measure_order(p, order).peak;
    auto peak = before;
    while (const auto lower = lower_peak(p, order, peak - 1)) {
      const auto e = evaluate(p, with_drops(p, *lower));
      REQUIRE(e.peak < peak);
      order = *lower;
      peak = e.peak;
    }
    ++all;
    const bool optimal = !exhaustive_optimum(p, peak - 1);
    least += optimal;
    least_before += optimal && peak == before;
  }
  CAPTURE(all, least, least_before);
  CHECK(least > 0.8 * all);
  CHECK(least > 2 * least_before);
}

TEST_CASE("lower_peak gives the same orders for sizes near 2^50 bytes as for small sizes, up to rounded prices") {
  constexpr bytes_t large = bytes_t{1} << 46;
  std::mt19937_64 g(5);
  int lowered = 0, equal = 0;
  for (int round = 0; round < shortened(100); ++round) {
    const auto p = any_problem(g, round);
    auto values = p.values();
    auto operations = p.operations();
    for (auto& v : values) v.bytes *= large;
    for (auto& o : operations) o.workspace *= large;
    const problem scaled(p.name(), values, operations, p.targets());
    const auto start = needed_operations(p);
    const auto order = lower_peak(p, start, measure_order(p, start).peak - 1);
    const auto same = lower_peak(scaled, start, (measure_order(p, start).peak - 1) * large);
    CHECK(order.has_value() == same.has_value());
    equal += order == same;
    lowered += order.has_value();
  }
  CHECK(lowered > shortened(20));
  CHECK(equal >= shortened(98));
}

TEST_CASE("smallest_budget from the last schedule is never worse than without it, and mostly optimal") {
  std::mt19937_64 g(37);
  int all = 0, least = 0, better = 0;
  for (int round = 0; round < shortened(300); ++round) {
    const auto p = any_problem(g, round);
    const auto warm = smallest_budget(p, min_cut(), {}, 0.002);
    const auto cold = smallest_budget(p, cold_min_cut(), {}, 0.002);
    REQUIRE(evaluate(p, warm.schedule).peak == warm.peak);
    REQUIRE(warm.peak <= cold.peak);
    REQUIRE(exhaustive_optimum(p, warm.peak));
    ++all;
    least += !exhaustive_optimum(p, warm.peak - 1);
    better += warm.peak < cold.peak;
  }
  CAPTURE(all, least, better);
  CHECK(least > 0.93 * all);
  CHECK(better >= shortened(1));
}
