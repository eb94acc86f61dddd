// SPDX-License-Identifier: Apache-2.0
/// @file
/// Allocations with known live ranges, and the largest sum of live bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat {

/// Bytes that are live from `birth` until just before `death`. The unit of time is arbitrary.
struct allocation {
  std::int64_t birth = 0, death = 0;  ///< birth < death; within +- 2^62
  bytes_t bytes = 0;                  ///< >= 0
};

/// The largest sum of bytes that are live at the same time. No layout has a smaller arena.
struct peak_load {
  bytes_t bytes = 0;
  std::int64_t when = 0;  ///< first instant with this sum
};

/// Computes the largest sum of live bytes.
/// @param list n allocations
/// @return the largest sum in bytes, and the first instant with this sum
/// Complexity: O(n log n).
/// @code
/// remat::peak_load_of(std::vector<remat::allocation>{{0, 2, 100}, {1, 3, 50}});  // 150 bytes at 1
/// @endcode
inline peak_load peak_load_of(std::span<const allocation> list) {
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
  bytes_t live = 0;
  peak_load peak;
  for (const auto& c : changes)
    if ((live += c.bytes) > peak.bytes) peak = {live, c.when};
  return peak;
}

namespace detail {

inline constexpr std::int64_t latest_instant = std::int64_t{1} << 62;  // so that differences do not overflow

inline void require_alignment(bytes_t alignment) {
  if (alignment <= 0 || (alignment & (alignment - 1)) != 0)
    throw bad_option("layout_options.alignment must be a power of two, got " + std::to_string(alignment));
}

/// The allocations with sizes rounded up to the alignment.
/// @throws bad_problem naming an allocation that is invalid or makes the sizes exceed 2^53 bytes
inline std::vector<allocation> rounded(std::span<const allocation> list, bytes_t alignment) {
  std::vector<allocation> out(list.begin(), list.end());
  bytes_t total = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto& a = out[i];
    if (a.birth >= a.death) throw bad_problem("allocation " + std::to_string(i) + " dies before it is born");
    if (a.birth < -latest_instant || a.death > latest_instant)
      throw bad_problem("allocation " + std::to_string(i) + ": its instants are beyond 2^62");
    if (a.bytes < 0 || a.bytes > max_bytes - total)
      throw bad_problem("allocation " + std::to_string(i) + ": " + std::to_string(a.bytes) +
                        " bytes are negative or exceed 2^53");
    total += a.bytes = (a.bytes + alignment - 1) / alignment * alignment;
  }
  return out;
}

}  // namespace detail
}  // namespace remat
