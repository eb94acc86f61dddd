// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory at each slot of an order of computations that changes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <remat/core/types.hpp>

namespace remat::order {

/// Bytes at every slot, with additions to ranges of slots. Slots form blocks, and each block knows its maximum. A slot without a
/// step has a negative number of bytes.
/// Complexity: O(block + slots / block) for a range, O(1) for a slot.
class slot_memory {
 public:
  using slot = std::size_t;
  static constexpr std::size_t block = 64;
  static constexpr bytes_t empty = bytes_t{1} << 60;  ///< subtracted from the bytes of a slot without a step

  /// @param bytes of each slot, for whole blocks. Complexity: O(slots).
  void load(std::vector<bytes_t> bytes) {
    bytes_ = std::move(bytes);
    added_.assign(bytes_.size() / block, 0);
    max_.assign(added_.size(), 0);
    ranked_.resize(added_.size());
    update_maxima(0, bytes_.size());
  }

  bytes_t at(slot k) const { return bytes_[k] + added_[k / block]; }
  /// The maximum over all slots; 0 if no step needs more.
  bytes_t peak() const {
    bytes_t highest = 0;
    for (std::size_t b = 0; b < max_.size(); ++b) highest = std::max(highest, max_of(b));
    return highest;
  }
  /// True if no slot in the block that begins at slot k has a step.
  bool is_empty_block(slot k) const { return max_of(k / block) < -empty / 2; }
  /// Finds the slots that need more than `budget`, ascending. Complexity: O(slots / block + blocks with such slots).
  void find_above(bytes_t budget, std::vector<slot>& list) const {
    list.clear();
    for (std::size_t b = 0; b < max_.size(); ++b)
      if (max_of(b) > budget)
        for (slot k = b * block; k < (b + 1) * block; ++k)
          if (at(k) > budget) list.push_back(k);
  }
  /// The first slot in [from, to) that needs more than `limit`, or `to`.
  slot first_above(bytes_t limit, slot from, slot to) const {
    for (slot k = from; k < to;) {
      const auto stop = std::min(to, (k / block + 1) * block);
      if (max_of(k / block) > limit)
        for (; k < stop; ++k)
          if (at(k) > limit) return k;
      k = stop;
    }
    return to;
  }
  /// How much `bytes` more in [from, to) would raise the excess over `budget`, summed over steps. Ends soon after the sum
  /// exceeds `limit`.
  /// @param from first slot; on return the end of the slots that are summed
  double added_excess(bytes_t bytes, slot& from, slot to, bytes_t budget, double limit) const {
    double sum = 0;
    while (from < to && sum < limit) {
      const auto b = from / block;
      const auto stop = std::min(to, (b + 1) * block);
      if (const auto level = budget - added_[b]; max_[b] + bytes > level) {
        bytes_t raised = 0;
        if (stop - from == block)
          raised = excess(b, level - bytes) - (max_[b] > level ? excess(b, level) : 0);
        else
          for (slot k = from; k < stop; ++k) raised += std::clamp<bytes_t>(bytes_[k] + bytes - level, 0, bytes);
        sum += static_cast<double>(raised);
      }
      from = stop;
    }
    return sum;
  }

  /// Adds bytes to the slots [from, to).
  void add(bytes_t bytes, slot from, slot to) {
    for (slot k = from; k < to;) {
      const auto b = k / block;
      const auto stop = std::min(to, (b + 1) * block);
      if (stop - k == block) {
        added_[b] += bytes;
        k = stop;
      } else {
        for (; k < stop; ++k) bytes_[k] += bytes;
        update_max(b);
      }
    }
  }
  /// Sets the bytes of a slot. The maxima are wrong until a call of `update_maxima`.
  void set(slot k, bytes_t bytes) { bytes_[k] = bytes - added_[k / block]; }
  /// Computes the maxima of the blocks of [from, to).
  void update_maxima(slot from, slot to) {
    for (auto b = from / block; b * block < to; ++b) update_max(b);
  }

 private:
  struct rank {
    bytes_t bytes, sum;  ///< of a step; of this step and all steps that need more
  };

  bytes_t max_of(std::size_t b) const { return max_[b] + added_[b]; }
  void update_max(std::size_t b) {
    max_[b] = *std::max_element(bytes_.begin() + static_cast<std::ptrdiff_t>(b * block),
                                bytes_.begin() + static_cast<std::ptrdiff_t>((b + 1) * block));
    ranked_[b].clear();
  }
  /// Sum over the steps of a block of the bytes above `level`, without `added_`. Complexity: O(log(block)), plus a sort if the
  /// block has changed.
  bytes_t excess(std::size_t b, bytes_t level) const {
    auto& list = ranked_[b];
    if (list.empty()) {
      for (slot k = b * block; k < (b + 1) * block; ++k)
        if (bytes_[k] > -empty / 2) list.push_back({bytes_[k], 0});
      std::sort(list.begin(), list.end(), [](const auto& x, const auto& y) { return x.bytes > y.bytes; });
      bytes_t sum = 0;
      for (auto& x : list) sum = x.sum = sum + x.bytes;
    }
    const auto rest = std::partition_point(list.begin(), list.end(), [&](const auto& x) { return x.bytes > level; });
    return rest == list.begin() ? 0 : (rest - 1)->sum - (rest - list.begin()) * level;
  }

  std::vector<bytes_t> bytes_;                     // per slot, without `added_`
  std::vector<bytes_t> added_, max_;               // per block: bytes added to all its slots; maximum of `bytes_`
  mutable std::vector<std::vector<rank>> ranked_;  // per block: its steps, most bytes first; empty until needed
};

}  // namespace remat::order
