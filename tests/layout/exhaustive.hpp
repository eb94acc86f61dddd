// SPDX-License-Identifier: Apache-2.0
// Helpers of the layout tests: a check of all pairs, an exhaustive search, and lists with known answers.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstddef>
#include <cstdint>
#include <random>
#include <remat/layout/layout.hpp>
#include <vector>

namespace layouts {

using namespace remat;

/// Checks a layout: allocations alive at the same time do not overlap, the arena ends at the highest byte, and the live peak
/// equals that of a scan over all births.
inline void check(const std::vector<allocation>& list, const layout& l, bytes_t alignment) {
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
  CHECK(l.bound >= l.live_peak);
  CHECK(l.arena >= l.bound);
}

/// The smallest arena, by backtracking over all offsets below `limit`.
inline bytes_t smallest_arena(const std::vector<allocation>& list) {
  std::vector<bytes_t> offsets(list.size(), 0);
  for (bytes_t limit = peak_load_of(list).bytes;; ++limit) {
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

inline std::vector<allocation> random_list(std::mt19937& random, std::size_t n, int times, int bytes) {
  std::vector<allocation> list;
  for (std::size_t i = 0; i < n; ++i) {
    const auto birth = static_cast<std::int64_t>(random() % static_cast<unsigned>(times));
    list.push_back({birth, birth + 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(times)),
                    static_cast<bytes_t>(1 + random() % static_cast<unsigned>(bytes))});
  }
  return list;
}

/// Random allocations with exactly `load` bytes alive at each of `times` instants. At each instant but the first, each allocation
/// dies with probability 1/3. One list in a few hundred has no layout of `load` bytes.
inline std::vector<allocation> full_list(std::mt19937& random, std::int64_t times, bytes_t load) {
  std::vector<allocation> list;
  for (std::int64_t now = 0; now < times; ++now) {
    auto free = load;
    for (auto& a : list) {
      if (a.death == times && random() % 3 == 0) a.death = now;
      if (a.death == times) free -= a.bytes;
    }
    for (; free > 0; free -= list.back().bytes)
      list.push_back({now, times, 1 + static_cast<bytes_t>(random() % static_cast<std::uint64_t>(std::min<bytes_t>(free, 4)))});
  }
  return list;
}

/// Short lists of both kinds: random lists and full lists.
inline std::vector<allocation> short_list(std::mt19937& random) {
  return random() % 3 == 0 ? random_list(random, 3 + random() % 5, 5, 5) : full_list(random, 7, 7);
}

/// A rectangle of time x bytes cut into `n` pieces, which therefore have a layout without gaps.
inline std::vector<allocation> sliced(std::mt19937& random, std::size_t n, std::int64_t times, bytes_t bytes) {
  struct piece {
    std::int64_t from, to;
    bytes_t low, high;
  };
  std::vector<piece> pieces = {{0, times, 0, bytes}};
  const auto inside = [&](std::int64_t low, std::int64_t high) {
    return low + 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low - 1));
  };
  while (pieces.size() < n) {
    auto& p = pieces[random() % pieces.size()];
    auto rest = p;
    if (random() % 2 == 0 && p.to - p.from > 1)
      p.to = rest.from = inside(p.from, p.to);
    else if (p.high - p.low > 1)
      p.high = rest.low = inside(p.low, p.high);
    else
      continue;
    pieces.push_back(rest);
  }
  std::shuffle(pieces.begin(), pieces.end(), random);
  std::vector<allocation> list;
  for (const auto& p : pieces) list.push_back({p.from, p.to, p.high - p.low});
  return list;
}

}  // namespace layouts
