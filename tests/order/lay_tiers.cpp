// SPDX-License-Identifier: Apache-2.0
// Copies for problems on a device and a host: weights, gradients and optimizers on both.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <vector>

#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/order/lay_copies.hpp>

#include "../tiers.hpp"

using remat::bytes_t;
using remat::problem;
using remat::testing::chance;
using remat::testing::host;
using remat::testing::uniform;

namespace {

/// Some operations of the device run again some time later.
std::vector<remat::operation_id> repeated(std::mt19937_64& g, const problem& p) {
  auto order = remat::needed_operations(p);
  const auto first = order;
  for (auto o : first)
    if (!p.operations()[o].once && chance(g, 30)) {
      const auto made = std::find(order.begin(), order.end(), o) - order.begin();
      order.insert(order.begin() + uniform(g, made + 1, static_cast<std::int64_t>(order.size())), o);
    }
  return order;
}

}  // namespace

TEST_CASE("lay_copies on two tiers: every schedule is valid and within both budgets") {
  std::mt19937_64 g(21);
  int laid = 0, full = 0, refused = 0, drawn = 0;
  for (int round = 0; round < 4000; ++round) {
    auto p = round % 2 == 0 ? remat::testing::random_tiers_problem(g)
                            : remat::testing::random_step(
                                  g, {.layers = static_cast<std::size_t>(uniform(g, 1, 6)), .cyclic = chance(g, 50)});
    if (p.plain()) continue;
    ++drawn;
    if (!remat::order::unplannable(p).empty()) {
      ++refused;
      continue;
    }
    if (chance(g, 30)) p = remat::testing::with_budgets(p, {std::nullopt, uniform(g, 0, 60)});
    const bool again = chance(g, 50);
    const auto order = again ? repeated(g, p) : remat::needed_operations(p);
    const auto least = remat::bounds_without_search(p).budget;
    for (const auto budget : {least - 1, least, least + uniform(g, 0, 20), least + 1000})
      for (const bool frugal : {false, true}) {
        INFO("round " << round << ", budget " << budget << ", frugal " << frugal);
        const auto found = remat::order::lay_copies(p, order, budget, {.frugal = frugal, .small = 0});
        if (!found) {
          ++full;
          continue;
        }
        ++laid;
        const auto e = remat::evaluate(p, found->schedule);
        REQUIRE(e.peak <= budget);
        REQUIRE(e.peak >= least);
        if (p.next().empty()) REQUIRE(e.seconds <= found->seconds * (1 + 1e-12) + 1e-12);
        if (again) continue;
        auto computed = remat::compute_order(found->schedule);
        std::sort(computed.begin(), computed.end());
        REQUIRE(computed == order);
      }
  }
  CAPTURE(drawn, refused, laid, full);
  CHECK(laid > 10'000);
  CHECK(full > 1000);
  CHECK(3 * refused < 2 * drawn);
}
