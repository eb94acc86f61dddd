// SPDX-License-Identifier: Apache-2.0
/// @file
/// Static memory layout: a byte offset for every allocation of a program whose lifetimes are known.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat {

/// Bytes that are needed from `birth` until just before `death`, in any unit of time.
struct allocation {
  std::int64_t birth = 0, death = 0;  ///< birth < death
  bytes_t bytes = 0;                  ///< >= 0
};

/// How `lay_out` works.
struct layout_options {
  bytes_t alignment = 64;          ///< of every offset, bytes; a power of two. Sizes are rounded up to it
  std::size_t tries = 400;         ///< orders tried after the fixed ones; 0 for none
  std::size_t work = 200'000'000;  ///< pairs of allocations looked at, about: ends the tries early for long lists
  std::uint64_t seed = 0;          ///< of the tries
};

/// Where everything lies.
struct layout {
  std::vector<bytes_t> offsets;  ///< per allocation
  bytes_t arena = 0;             ///< end of the highest allocation: bytes to reserve
  bytes_t live_peak = 0;         ///< largest sum of (rounded) bytes alive at one time: no layout has a smaller arena
};

namespace detail {

/// Largest sum of bytes alive at one time.
inline bytes_t live_peak(std::span<const allocation> list) {
  struct change {
    std::int64_t when;
    bytes_t bytes;
  };
  std::vector<change> changes;
  changes.reserve(2 * list.size());
  for (const auto& a : list) {
    changes.push_back({a.birth, a.bytes});
    changes.push_back({a.death, -a.bytes});
  }
  std::sort(changes.begin(), changes.end(),
            [](const change& a, const change& b) { return a.when != b.when ? a.when < b.when : a.bytes < b.bytes; });
  bytes_t live = 0, peak = 0;
  for (const auto& c : changes) peak = std::max(peak, live += c.bytes);
  return peak;
}

/// Places the allocations one by one, each into the tightest gap that all its placed contemporaries leave.
/// @return the arena; stops and returns a larger one as soon as it exceeds `limit`
inline bytes_t best_fit(std::span<const allocation> list, std::span<const index_t> order, bytes_t limit,
                        std::vector<bytes_t>& offsets, std::size_t& work) {
  std::vector<index_t> placed;  // by offset
  placed.reserve(order.size());
  bytes_t arena = 0;
  for (auto i : order) {
    const auto& a = list[i];
    bytes_t best = -1, tightest = std::numeric_limits<bytes_t>::max(), free = 0;
    for (auto j : placed) {
      const auto& b = list[j];
      if (b.death <= a.birth || a.death <= b.birth) continue;
      const auto gap = offsets[j] - free;
      if (gap >= a.bytes && gap < tightest) {
        best = free;
        tightest = gap;
      }
      free = std::max(free, offsets[j] + b.bytes);
    }
    work += placed.size();
    offsets[i] = best < 0 ? free : best;
    arena = std::max(arena, offsets[i] + a.bytes);
    if (arena > limit) return arena;
    auto above = [&](bytes_t offset, index_t j) { return offset < offsets[j]; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), offsets[i], above), i);
  }
  return arena;
}

}  // namespace detail

/// Gives every allocation an offset such that no two that are alive at the same time overlap.
///
/// Best fit in four orders (bytes, duration, bytes x duration, birth), then in orders made by moving what lies highest, and a
/// random other allocation, to an earlier place in the best order so far. Ends as soon as the arena equals the live peak.
///
/// @param list allocations
/// @param o    alignment and effort
/// @return offsets, arena and live peak; equal arguments give equal results
/// @throws bad_option if the alignment is no power of two; bad_problem naming an allocation that dies before it is born or has a
///         negative size, or if the sizes exceed 2^53 bytes
/// Complexity: O(n^2) per order, O(n^2 + `work`) in total; O(n) memory.
/// @code
/// auto l = remat::lay_out(std::vector<remat::allocation>{{0, 2, 100}, {1, 3, 50}, {2, 4, 100}});
/// // l.arena == 192: the third takes the place of the first
/// @endcode
inline layout lay_out(std::span<const allocation> list, const layout_options& o = {}) {
  if (o.alignment <= 0 || (o.alignment & (o.alignment - 1)) != 0)
    throw bad_option("layout_options.alignment must be a power of two, got " + std::to_string(o.alignment));
  std::vector<allocation> rounded(list.begin(), list.end());
  bytes_t total = 0;
  for (std::size_t i = 0; i < rounded.size(); ++i) {
    auto& a = rounded[i];
    if (a.birth >= a.death) throw bad_problem("allocation " + std::to_string(i) + " dies before it is born");
    if (a.bytes < 0 || a.bytes > max_bytes - total)
      throw bad_problem("allocation " + std::to_string(i) + ": " + std::to_string(a.bytes) +
                        " bytes are negative or exceed 2^53");
    total += a.bytes = (a.bytes + o.alignment - 1) / o.alignment * o.alignment;
  }

  layout best;
  best.offsets.assign(list.size(), 0);
  best.arena = std::numeric_limits<bytes_t>::max();
  best.live_peak = detail::live_peak(rounded);
  std::vector<index_t> order(list.size()), best_order;
  std::vector<bytes_t> offsets(list.size(), 0);
  std::size_t work = 0;
  auto attempt = [&](bytes_t limit) {
    const auto arena = detail::best_fit(rounded, order, limit, offsets, work);
    if (arena > limit) return;
    best.arena = arena;
    best.offsets = offsets;
    best_order = order;
  };

  auto duration = [&](index_t i) { return static_cast<double>(rounded[i].death - rounded[i].birth); };
  auto bytes = [&](index_t i) { return static_cast<double>(rounded[i].bytes); };
  for (int key = 0; key < 4 && best.arena > best.live_peak; ++key) {
    std::iota(order.begin(), order.end(), index_t{0});
    auto less = [&](index_t a, index_t b) {
      if (key == 0 && rounded[a].bytes != rounded[b].bytes) return rounded[a].bytes > rounded[b].bytes;
      if (key == 2) return bytes(a) * duration(a) > bytes(b) * duration(b);
      if (key == 3) return rounded[a].birth < rounded[b].birth;
      return duration(a) > duration(b);
    };
    std::stable_sort(order.begin(), order.end(), less);
    attempt(best.arena - 1);
  }

  std::mt19937_64 random(o.seed);
  auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  for (std::size_t t = 0; t < o.tries && work < o.work && best.arena > best.live_peak; ++t) {
    order = best_order;
    auto promote = [&](std::size_t from) {
      const auto to = below(from + 1);
      std::rotate(order.begin() + static_cast<std::ptrdiff_t>(to), order.begin() + static_cast<std::ptrdiff_t>(from),
                  order.begin() + static_cast<std::ptrdiff_t>(from) + 1);
    };
    for (std::size_t k = 0; k < order.size(); ++k)
      if (best.offsets[order[k]] + rounded[order[k]].bytes == best.arena) promote(k);
    if (below(2) == 0) promote(below(order.size()));
    attempt(best.arena);  // an equally good order is taken too: it may lead on
  }
  if (list.empty()) best.arena = 0;
  return best;
}

}  // namespace remat
