// SPDX-License-Identifier: Apache-2.0
/// @file
/// Bytes at each position of an order, with range addition and range maximum.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <remat/core/types.hpp>

namespace remat {

/// A segment tree over positions: range addition, range maximum.
/// @code
/// remat::range_peak memory(bytes);
/// memory.add(2, 7, -1024);  // a value that leaves from position 2 to 7
/// if (memory.max(2, 7) + 512 <= budget) fits();
/// @endcode
class range_peak {
 public:
  /// @param bytes at each position. Complexity: O(positions).
  explicit range_peak(std::span<const bytes_t> bytes)
      : leaves_(std::bit_ceil(std::max<std::size_t>(1, bytes.size()))),
        max_(2 * leaves_, std::numeric_limits<bytes_t>::min() / 2),
        added_(leaves_, 0) {
    std::copy(bytes.begin(), bytes.end(), max_.begin() + static_cast<std::ptrdiff_t>(leaves_));
    for (auto node = leaves_; node-- > 1;) max_[node] = std::max(max_[2 * node], max_[2 * node + 1]);
  }

  /// Bytes at a position. Complexity: O(log(positions)).
  bytes_t at(std::size_t position) const {
    auto node = position + leaves_;
    auto bytes = max_[node];
    while (node >>= 1) bytes += added_[node];
    return bytes;
  }
  /// The maximum over the positions [from, to), bytes; far below 0 for an empty range. Complexity: O(log(positions)).
  bytes_t max(std::size_t from, std::size_t to) const { return max(1, 0, leaves_, from, to); }
  /// The first position of the maximum. Complexity: O(log(positions)).
  std::size_t position_of_max() const {
    std::size_t node = 1;
    while (node < leaves_) node = max_[2 * node + 1] > max_[2 * node] ? 2 * node + 1 : 2 * node;
    return node - leaves_;
  }
  /// Adds `bytes` to the positions [from, to). Complexity: O(log(positions)).
  void add(std::size_t from, std::size_t to, bytes_t bytes) {
    if (from >= to) return;
    auto low = from + leaves_, high = to + leaves_;
    for (; low < high; low >>= 1, high >>= 1) {
      if (low & 1) raise(low++, bytes);
      if (high & 1) raise(--high, bytes);
    }
    update(from + leaves_);
    update(to - 1 + leaves_);
  }

 private:
  void raise(std::size_t node, bytes_t bytes) {
    max_[node] += bytes;
    if (node < leaves_) added_[node] += bytes;
  }
  void update(std::size_t node) {
    while (node >>= 1) max_[node] = std::max(max_[2 * node], max_[2 * node + 1]) + added_[node];
  }
  bytes_t max(std::size_t node, std::size_t begin, std::size_t end, std::size_t from, std::size_t to) const {
    if (from >= end || to <= begin) return std::numeric_limits<bytes_t>::min() / 2;
    if (from <= begin && end <= to) return max_[node];
    const auto middle = begin + (end - begin) / 2;
    return std::max(max(2 * node, begin, middle, from, to), max(2 * node + 1, middle, end, from, to)) + added_[node];
  }

  std::size_t leaves_;
  std::vector<bytes_t> max_;    // maximum over the positions below a node, without additions to the nodes above it
  std::vector<bytes_t> added_;  // addition to all positions below a node
};

}  // namespace remat
