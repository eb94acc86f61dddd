// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <random>
#include <remat/layout/layout.hpp>
#include <vector>

#include "exhaustive.hpp"

using namespace remat;
using namespace layouts;

TEST_CASE("lay_out finds the smallest arena of small lists, and proves it") {
  std::mt19937 random(5);
  int exact = 0, fragmented = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto list = short_list(random);
    const auto l = lay_out(list, {.alignment = 1});
    check(list, l, 1);
    const auto least = smallest_arena(list);
    REQUIRE(l.arena == least);
    REQUIRE(l.bound == least);
    exact += least == l.live_peak;
    fragmented += least > l.live_peak;
  }
  CHECK(exact > 15000);
  CHECK(fragmented > 10);
}

TEST_CASE("fit_within finds a layout within a capacity, or proves that there is none") {
  std::mt19937 random(6);
  const monitor m;
  int exhausted = 0;
  for (int round = 0; round < 20000; ++round) {
    const auto list = short_list(random);
    const auto least = smallest_arena(list);
    const auto enough = fit_within(list, least, {.alignment = 1}, m);
    REQUIRE(enough.status == fit_status::fits);
    check(list, enough.best, 1);
    REQUIRE(enough.best.arena == least);
    const auto less = fit_within(list, least - 1, {.alignment = 1}, m);
    REQUIRE(less.status == (less.load.bytes > least - 1 ? fit_status::overload : fit_status::exhausted));
    check(list, less.best, 1);
    exhausted += less.status == fit_status::exhausted;
  }
  CHECK(exhausted > 5);
  CHECK(fit_within({}, 0, {}, m).status == fit_status::fits);
  CHECK_THROWS_AS(fit_within({}, -1, {}, m), bad_option);
}

TEST_CASE("fit_within names the overload and its time") {
  const std::vector<allocation> list = {{0, 4, 10}, {2, 6, 20}, {5, 9, 5}};
  const auto r = fit_within(list, 29, {.alignment = 1}, monitor());
  CHECK(r.status == fit_status::overload);
  CHECK(r.load.bytes == 30);
  CHECK(r.load.when == 2);
}

TEST_CASE("a stopped search and a search without effort return the layout of the heuristics") {
  std::mt19937 random(3);
  std::vector<allocation> list;
  while (lay_out(list, {.alignment = 1, .tries = 0}).arena == peak_load_of(list).bytes) list = sliced(random, 60, 100, 1000);
  const auto first = lay_out(list, {.alignment = 1, .tries = 0});
  check(list, first, 1);
  monitor stopped;
  stopped.request_stop();
  for (const auto& l : {lay_out(list, {.alignment = 1}, stopped), lay_out(list, {.alignment = 1}, monitor({.seconds = 0})),
                        lay_out(list, {.alignment = 1, .work = 0})})
    CHECK(l.offsets == first.offsets);
  const auto r = fit_within(list, 1000, {.alignment = 1}, stopped);
  CHECK(r.status == fit_status::unknown);
  CHECK(r.best.offsets == first.offsets);
}

TEST_CASE("lay_out packs slices of a rectangle into the rectangle again") {
  for (unsigned seed = 0; seed < 10; ++seed) {
    std::mt19937 random(seed);
    const auto list = sliced(random, 40 + 10 * seed, 200, 1024);
    const auto l = lay_out(list, {.alignment = 1, .work = layout_options::unlimited});
    check(list, l, 1);
    CHECK(l.arena == 1024);
  }
}

/// Puts each allocation, in the order of birth, at the lowest free offset: the best case of an ordinary allocator.
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

TEST_CASE("lay_out uses known lifetimes to avoid the holes of first fit") {
  const std::vector<allocation> list = {{3, 4, 1}, {3, 8, 3}, {4, 6, 2}, {5, 8, 3}, {6, 9, 3}, {7, 9, 4}, {8, 13, 1}};
  CHECK(first_fit_by_birth(list) == 16);
  const auto l = lay_out(list, {.alignment = 1});
  check(list, l, 1);
  CHECK(l.arena == 13);
  CHECK(l.live_peak == 13);
}

TEST_CASE("layouts of long lists are valid, near the live peak, and reproducible") {
  std::mt19937 random(9);
  for (std::size_t n : {100u, 1000u, 5000u}) {
    std::vector<allocation> list;  // a forward and its backward: a third of the allocations are nested, the others are temporary
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

TEST_CASE("lay_out: empty lists, invalid lifetimes and sizes, and bad alignments") {
  CHECK(lay_out({}).arena == 0);
  const std::vector<allocation> empty = {{0, 1, 0}, {0, 2, 10}};
  const auto l = lay_out(empty);
  check(empty, l, 64);
  CHECK(l.arena == 64);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{1, 1, 4}}), bad_problem);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, -4}}), bad_problem);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, std::numeric_limits<std::int64_t>::max(), 4}}), bad_problem);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, max_bytes}, {0, 1, max_bytes}}), bad_problem);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, 4}}, {.alignment = 48}), bad_option);
  CHECK_THROWS_AS(lay_out(std::vector<allocation>{{0, 1, 4}}, {.alignment = 0}), bad_option);
}
