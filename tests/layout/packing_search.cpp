// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <random>
#include <remat/layout/packing_search.hpp>
#include <vector>

#include "exhaustive.hpp"

using namespace remat;
using namespace layouts;
using outcome = detail::packing_search::outcome;
using rule = detail::packing_strategy::rule;

TEST_CASE("cliques are maximal, and neighbours share an instant") {
  // Allocation 1 dies before allocation 2 is born, and allocation 0 when allocation 3 is born.
  const std::vector<allocation> list = {{0, 4, 6}, {1, 2, 4}, {2, 5, 10}, {4, 6, 2}, {0, 6, 0}};
  const auto p = detail::packing_problem_of(list, 100);
  REQUIRE(p);
  CHECK(p->unit == 2);
  CHECK(p->allocation_of == std::vector<index_t>{0, 1, 2, 3});
  CHECK(p->cliques == std::vector<std::vector<index_t>>{{0, 1}, {0, 2}, {2, 3}});
  CHECK(p->neighbours == std::vector<std::vector<index_t>>{{1, 2}, {0}, {0, 3}, {2}});
  CHECK(p->items[2].size == 5);
  CHECK_FALSE(detail::packing_problem_of(list, 2));
}

TEST_CASE("every search strategy finds the smallest arena and proves it") {
  std::mt19937 random(11);
  const monitor m;
  constexpr auto unlimited = std::numeric_limits<std::size_t>::max();
  int proofs = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto list = short_list(random);
    const auto least = smallest_arena(list);
    const auto p = detail::packing_problem_of(list, 1000);
    REQUIRE(p);
    detail::packing_search search(*p);
    std::vector<double> keys;
    for (std::size_t i = 0; i < list.size(); ++i) keys.push_back(static_cast<double>(random() % 100));
    for (auto clique : {rule::lowest_floor, rule::weighted_floor, rule::few_branches})
      for (bool sorted_twins : {false, true}) {
        const detail::packing_strategy s{clique, keys, sorted_twins};
        REQUIRE(search.run(s, least / p->unit, unlimited, unlimited, m) == outcome::found);
        layout l;
        for (index_t k = 0; k < list.size(); ++k) {
          l.offsets.push_back(search.offset(k) * p->unit);
          l.arena = std::max(l.arena, l.offsets[k] + list[k].bytes);
        }
        l.live_peak = l.bound = peak_load_of(list).bytes;
        check(list, l, 1);
        REQUIRE(l.arena == least);
        REQUIRE(search.run(s, (least - 1) / p->unit, unlimited, unlimited, m) == outcome::exhausted);
        proofs += least > l.live_peak;
      }
  }
  CHECK(proofs > 50);
}

TEST_CASE("a packing search ends at its limits of nodes and work") {
  std::mt19937 random(2);
  const auto list = sliced(random, 100, 500, 1000);
  const auto p = detail::packing_problem_of(list, 100'000);
  REQUIRE(p);
  detail::packing_search search(*p);
  const detail::packing_strategy s{rule::few_branches, std::vector<double>(p->items.size(), 0), false};
  CHECK(search.run(s, 1000 / p->unit, 10, 1'000'000, monitor()) == outcome::cut);
  CHECK(search.run(s, 1000 / p->unit, 1000, 10, monitor()) == outcome::cut);
}
