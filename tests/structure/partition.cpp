// SPDX-License-Identifier: Apache-2.0
// Partitions: cut where little crosses.
#include <catch2/catch.hpp>

#include <remat/structure/partition.hpp>
#include <remat/testing/generators.hpp>

#include "../networks.hpp"

using namespace remat;
using namespace remat::testing;

TEST_CASE("parts are cut where little crosses") {
  const auto chain = structure::find_partition(unit_training_chain(60), {.size = 10});
  CHECK(chain.size() >= 7);
  const auto u = u_net(4, 6);
  const auto parts = structure::find_partition(u, {.size = 16});
  CHECK(parts.size() >= 5);
  const auto dense = dense_net(4, 6);
  CHECK(structure::find_partition(dense, {.size = 24}).size() >= 4);
  CHECK(structure::find_partition(branches(4, 3, 4), {.size = 24}).size() >= 4);
  CHECK(structure::find_partition(problem{}).empty());
  const auto t = transformer_training_graph(12);
  CHECK(structure::find_partition(t, {.backward_start = 150}).size() >= 6);
  CHECK(structure::find_partition(t, {.most = 3}).size() <= 3);
  CHECK_THROWS_WITH(structure::find_partition(t, {.backward_start = 5000}), Catch::Contains("backward_start"));
  CHECK_THROWS_WITH(structure::find_partition(t, {.size = 0}), Catch::Contains("size"));
  CHECK_THROWS_WITH(structure::find_partition(t, {.most = 0}), Catch::Contains("most"));
}
