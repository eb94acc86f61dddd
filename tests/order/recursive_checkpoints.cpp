// SPDX-License-Identifier: Apache-2.0
// Checkpoints at the middles: valid on any graph, with little memory on chains.
#include <catch2/catch.hpp>

#include <random>

#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/recursive_checkpoints.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;

TEST_CASE("recursive checkpoints are valid orders of any graph, for any beginning of the backward") {
  std::mt19937_64 g(4);
  int found = 0;
  for (int round = 0; round < 300; ++round) {
    const auto p = round % 2 == 0 ? testing::random_training_chain(g, 2 + static_cast<std::size_t>(round % 30))
                                  : testing::random_problem(g, {.operations = 3 + static_cast<std::size_t>(round % 40)});
    const auto needed = needed_operations(p);
    const auto turn = static_cast<std::size_t>(testing::uniform(g, 0, static_cast<std::int64_t>(needed.size())));
    for (const std::size_t leaf : {1, 2, 7})
      if (const auto order = order::recursive_checkpoints(p, needed, turn, leaf, 100'000)) {
        const auto e = evaluate(p, with_drops(p, *order));
        CHECK(e.peak == measure_order(p, *order).peak);
        ++found;
      }
  }
  CHECK(found > 800);
}

TEST_CASE("recursive checkpoints of a chain need logarithmic memory, and time within a logarithmic factor") {
  const auto p = testing::unit_training_chain(1 << 12);
  const auto needed = needed_operations(p);
  const std::size_t turn = 1 << 12;
  double last = 0;
  for (std::size_t leaf = turn; leaf > 0; leaf /= 8) {  // shorter leaves: less memory, more time
    const auto order = order::recursive_checkpoints(p, needed, turn, leaf, 100 * needed.size());
    REQUIRE(order);
    const auto needs = measure_order(p, *order);
    CHECK(needs.seconds >= last);
    CHECK(needs.peak <= static_cast<bytes_t>(leaf) + 3 * 12 + 4);
    last = needs.seconds;
  }
  CHECK(last <= 13 * static_cast<double>(needed.size()));
  CHECK_FALSE(order::recursive_checkpoints(p, needed, turn, 1, needed.size()));
  CHECK_FALSE(order::recursive_checkpoints(p, needed, turn, 1, 100 * needed.size(), [] { return true; }));
}

TEST_CASE("recursive checkpoints give up if a once-only operation would have to run twice") {
  std::vector<testing::layer> layers(40);
  for (auto& l : layers) l.once = true;
  const auto p = testing::training_chain(layers);
  CHECK_FALSE(order::recursive_checkpoints(p, needed_operations(p), 40, 1, 10'000));
}
