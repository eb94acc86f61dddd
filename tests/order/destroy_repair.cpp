// SPDX-License-Identifier: Apache-2.0
// Moves of the local search on orders: destroy and repair.
#include <catch2/catch.hpp>

#include <random>

#include <remat/core/evaluate.hpp>
#include <remat/order/destroy_repair.hpp>
#include <remat/testing/generators.hpp>

#include "../chain_or_random.hpp"

using namespace remat;
using namespace remat::testing;

TEST_CASE("every move of destroy_repair leaves a valid order with the reported peak and time") {
  std::mt19937_64 g(11);
  int repaired = 0, failed = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto p = chain_or_random(g, round);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    const auto budget = all - uniform(g, 0, all / 3);
    order::destroy_repair n(p, budget, g());
    n.load(needed_operations(p));
    for (int i = 0; i < 5; ++i) {
      n.shift();
      n.destroy();
      n.repair(1) ? ++repaired : ++failed;
      n.retain();
      const auto e = evaluate(p, with_drops(p, n.order()));
      REQUIRE(n.seconds() == Approx(e.seconds));
      REQUIRE(n.fits() == (e.peak <= budget));
    }
  }
  CHECK(repaired > 4000);
  CHECK(failed > 100);
}

TEST_CASE("retention within the budget never makes an order slower") {
  std::mt19937_64 g(12);
  int faster = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto p = chain_or_random(g, round);
    const auto peak = evaluate(p, store_all_schedule(p)).peak;
    order::destroy_repair tight(p, peak - peak / 4, 1), loose(p, peak - peak / 8, 1);
    tight.load(needed_operations(p));
    if (!tight.repair()) continue;
    loose.load(tight.order());
    REQUIRE(loose.fits());
    const auto before = loose.seconds();
    loose.retain();
    REQUIRE(loose.fits());
    REQUIRE(loose.seconds() <= before);
    faster += loose.seconds() < before;
  }
  CHECK(faster > 50);
}
