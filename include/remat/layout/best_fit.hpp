// SPDX-License-Identifier: Apache-2.0
/// @file
/// Layouts by best fit, in four fixed orders.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include <remat/layout/allocation.hpp>

namespace remat::detail {

/// Places the allocations one by one, each into the tightest gap that all its placed contemporaries leave.
/// @return the arena; stops and returns a larger one as soon as it exceeds `limit`
/// Complexity: O(n^2).
inline bytes_t best_fit(std::span<const allocation> list, std::span<const index_t> order, bytes_t limit,
                        std::vector<bytes_t>& offsets) {
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
    offsets[i] = best < 0 ? free : best;
    arena = std::max(arena, offsets[i] + a.bytes);
    if (arena > limit) return arena;
    auto above = [&](bytes_t offset, index_t j) { return offset < offsets[j]; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), offsets[i], above), i);
  }
  return arena;
}

/// The allocations by bytes, by duration, by bytes x duration, or by birth.
/// @param key 0 to 3
inline std::vector<index_t> best_fit_order(std::span<const allocation> list, int key) {
  auto duration = [&](index_t i) { return static_cast<double>(list[i].death - list[i].birth); };
  auto bytes = [&](index_t i) { return static_cast<double>(list[i].bytes); };
  auto before = [&](index_t a, index_t b) {
    if (key == 0 && list[a].bytes != list[b].bytes) return list[a].bytes > list[b].bytes;
    if (key == 2) return bytes(a) * duration(a) > bytes(b) * duration(b);
    if (key == 3) return list[a].birth < list[b].birth;
    return duration(a) > duration(b);
  };
  std::vector<index_t> order(list.size());
  std::iota(order.begin(), order.end(), index_t{0});
  std::stable_sort(order.begin(), order.end(), before);
  return order;
}

}  // namespace remat::detail
