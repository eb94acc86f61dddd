// SPDX-License-Identifier: Apache-2.0
// Tools of the core: ranges of bytes, and topological orders.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include <remat/core/range_peak.hpp>
#include <remat/core/topological_order.hpp>
#include <remat/testing/generators.hpp>

using remat::bytes_t;
using remat::testing::uniform;

TEST_CASE("range_peak agrees with a plain array") {
  std::mt19937_64 g(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<bytes_t> plain(static_cast<std::size_t>(uniform(g, 1, 40)));
    for (auto& x : plain) x = uniform(g, -5, 50);
    remat::range_peak tree(plain);
    for (int i = 0; i < 50; ++i) {
      const auto from = static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(plain.size()) - 1));
      const auto to =
          static_cast<std::size_t>(uniform(g, static_cast<std::int64_t>(from), static_cast<std::int64_t>(plain.size())));
      const auto bytes = uniform(g, -9, 9);
      tree.add(from, to, bytes);
      for (auto k = from; k < to; ++k) plain[k] += bytes;
      const auto at = static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(plain.size()) - 1));
      REQUIRE(tree.at(at) == plain[at]);
      REQUIRE(tree.position_of_max() == static_cast<std::size_t>(std::max_element(plain.begin(), plain.end()) - plain.begin()));
      const auto until =
          static_cast<std::size_t>(uniform(g, static_cast<std::int64_t>(at) + 1, static_cast<std::int64_t>(plain.size())));
      REQUIRE(tree.max(at, until) == *std::max_element(plain.begin() + static_cast<std::ptrdiff_t>(at),
                                                       plain.begin() + static_cast<std::ptrdiff_t>(until)));
    }
  }
}

TEST_CASE("topological_order puts inputs first, then the least key, and leaves out cycles and what depends on them") {
  using remat::topological_order;
  const auto key = [](std::size_t v) { return 10 - v / 2; };
  CHECK(topological_order({{}, {}, {}, {0}, {3, 3}}, key) == std::vector<std::size_t>{2, 0, 3, 4, 1});
  CHECK(topological_order({{1}, {0}, {}, {0}}, key) == std::vector<std::size_t>{2});
  CHECK(topological_order({}, key).empty());
}
