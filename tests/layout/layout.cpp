// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>
#include <random>
#include <remat/layout/layout.hpp>
#include <vector>

using namespace remat;

namespace {

/// No two allocations that share a moment share a byte; the arena ends at the highest byte; the live peak is what a scan over
/// all births counts.
void check(const std::vector<allocation>& list, const layout& l, bytes_t alignment) {
  auto rounded = [&](const allocation& a) { return (a.bytes + alignment - 1) / alignment * alignment; };
  REQUIRE(l.offsets.size() == list.size());
  bytes_t top = 0, peak = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    REQUIRE(l.offsets[i] >= 0);
    REQUIRE(l.offsets[i] % alignment == 0);
    top = std::max(top, l.offsets[i] + rounded(list[i]));
    bytes_t live = 0;
    for (std::size_t j = 0; j < list.size(); ++j) {
      if (list[j].birth <= list[i].birth && list[i].birth < list[j].death) live += rounded(list[j]);
      const bool together = i != j && list[i].birth < list[j].death && list[j].birth < list[i].death;
      if (together && list[i].bytes > 0 && list[j].bytes > 0) {
        const bool apart = l.offsets[i] + list[i].bytes <= l.offsets[j] || l.offsets[j] + list[j].bytes <= l.offsets[i];
        REQUIRE(apart);
      }
    }
    peak = std::max(peak, live);
  }
  CHECK(l.arena == top);
  CHECK(l.live_peak == peak);
  CHECK(l.arena >= l.live_peak);
}

/// Smallest arena: every allocation at every offset below `limit`, by backtracking.
bytes_t smallest_arena(const std::vector<allocation>& list) {
  std::vector<bytes_t> offsets(list.size(), 0);
  for (bytes_t limit = detail::live_peak(list);; ++limit) {
    auto place = [&](auto& self, std::size_t i) -> bool {
      if (i == list.size()) return true;
      for (offsets[i] = 0; offsets[i] + list[i].bytes <= limit; ++offsets[i]) {
        bool fits = true;
        for (std::size_t j = 0; j < i && fits; ++j)
          fits = list[j].death <= list[i].birth || list[i].death <= list[j].birth || offsets[j] + list[j].bytes <= offsets[i] ||
                 offsets[i] + list[i].bytes <= offsets[j];
        if (fits && self(self, i + 1)) return true;
      }
      return false;
    };
    if (place(place, 0)) return limit;
  }
}

std::vector<allocation> random_list(std::mt19937& random, std::size_t n, int times, int bytes) {
  std::vector<allocation> list;
  for (std::size_t i = 0; i < n; ++i) {
    const auto birth = static_cast<std::int64_t>(random() % static_cast<unsigned>(times));
    list.push_back({birth, birth + 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(times)),
                    static_cast<bytes_t>(1 + random() % static_cast<unsigned>(bytes))});
  }
  return list;
}

}  // namespace

TEST_CASE("small cases meet exhaustive search") {
  std::mt19937 random(5);
  int exact = 0, fragmented = 0;
  for (int round = 0; round < 300; ++round) {
    const auto list = random_list(random, 3 + random() % 4, 5, 5);
    const auto l = lay_out(list, {.alignment = 1});
    check(list, l, 1);
    const auto least = smallest_arena(list);
    CHECK(l.arena == least);
    exact += l.arena == l.live_peak;
    fragmented += least > l.live_peak;
  }
  CHECK(exact > 200);
  CHECK(exact + fragmented == 300);
}

/// Each allocation, in the order of birth, at the lowest offset that is free: what an ordinary allocator does at best.
bytes_t first_fit_by_birth(const std::vector<allocation>& list) {
  std::vector<bytes_t> offsets;
  bytes_t arena = 0;
  for (const auto& a : list) {
    bytes_t offset = 0;
    const auto clashes = [&] {
      for (std::size_t i = 0; i < offsets.size(); ++i)
        if (list[i].birth < a.death && a.birth < list[i].death && offsets[i] < offset + a.bytes &&
            offset < offsets[i] + list[i].bytes)
          return true;
      return false;
    };
    while (clashes()) ++offset;
    offsets.push_back(offset);
    arena = std::max(arena, offset + a.bytes);
  }
  return arena;
}

TEST_CASE("lifetimes known in advance leave no holes where first fit does") {
  const std::vector<allocation> list = {{3, 4, 1}, {3, 8, 3}, {4, 6, 2}, {5, 8, 3}, {6, 9, 3}, {7, 9, 4}, {8, 13, 1}};
  CHECK(first_fit_by_birth(list) == 16);
  const auto l = lay_out(list, {.alignment = 1});
  check(list, l, 1);
  CHECK(l.arena == 13);
  CHECK(l.live_peak == 13);
}

TEST_CASE("layouts of long lists are valid and quickly found") {
  std::mt19937 random(9);
  for (std::size_t n : {100u, 1000u, 5000u}) {
    std::vector<allocation> list;  // a forward and its backward: most allocations are nested, some are temporary
    const auto steps = static_cast<std::int64_t>(n);
    for (std::int64_t i = 0; i < steps; ++i) {
      const auto bytes = static_cast<bytes_t>(64 * (1 + random() % 5000));
      if (i % 3 == 0)
        list.push_back({i, 2 * steps - i, bytes});
      else
        list.push_back({i, i + 1 + static_cast<std::int64_t>(random() % 8), bytes});
    }
    const auto l = lay_out(list);
    check(list, l, 64);
    CHECK(static_cast<double>(l.arena) <= 1.03 * static_cast<double>(l.live_peak));
    const auto again = lay_out(list);
    CHECK(again.offsets == l.offsets);
  }
}

TEST_CASE("edges") {
  CHECK(lay_out({}).arena == 0);
  const std::vector<allocation> empty = {{0, 1, 0}, {0, 2, 10}};
  const auto l = lay_out(empty);
  check(empty, l, 64);
  CHECK(l.arena == 64);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{1, 1, 4}}), bad_problem);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, -4}}), bad_problem);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, max_bytes}, {0, 1, max_bytes}}), bad_problem);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, 4}}, {.alignment = 48}), bad_option);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, 4}}, {.alignment = 0}), bad_option);
}
