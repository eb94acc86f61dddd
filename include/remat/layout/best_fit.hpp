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

/// Places the allocations one by one. Each goes into the tightest gap between the placed allocations that are live with it, or
/// above them all if it fits in no gap.
/// @param list    n allocations
/// @param order   positions in `list`
/// @param limit   stops as soon as the arena exceeds this, bytes
/// @param offsets receives the offset of each allocation, bytes
/// @return the arena, bytes; a value above `limit` if it stopped
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

/// Sorts the allocations by bytes (0), duration (1), bytes x duration (2), all largest first, or by birth (3).
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
