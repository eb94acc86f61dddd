// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checkpoints at the ends of segments of the forward.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// Divides the forward into segments, retains the values that cross from one into another, and makes the others again when the
/// backward needs them. Of several divisions the fastest that fits is taken: into equal numbers of operations (sqrt(n) segments
/// among them) and, greedily, into equal bytes of values made.
///
/// On graphs of any shape. Values of once-only operations that the backward reads are retained.
///
/// Complexity: O(tries (values + edges executed)).
///
/// Reference: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", arXiv:1604.06174 (2016).
/// @code
/// auto r = remat::solve(p, budget, remat::chen{});
/// @endcode
class chen {
 public:
  struct options {
    std::optional<index_t> turn = {};  ///< first operation of the backward; by default where store-all's memory is highest
    std::size_t tries = 64;            ///< most segments that are tried, >= 1
  };

  chen() : chen(options{}) {}
  /// @throws bad_option if `tries` is 0
  explicit chen(const options& o) : options_(o) {
    if (o.tries < 1) throw bad_option("chen.tries must be >= 1, got 0");
  }

  std::string name() const { return "chen"; }

  /// @throws bad_option if `turn` is no operation
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (options_.turn && *options_.turn >= p.operations().size())
      throw bad_option("chen.turn: no operation " + std::to_string(*options_.turn));
    result r;
    const auto needed = needed_operations(p);
    incumbent best(p, budget);
    if (!best.offer(needed) && !needed.empty()) {
      const auto memory = measure_order(p, needed).memory;
      const auto turn = options_.turn ? std::lower_bound(needed.begin(), needed.end(), *options_.turn) - needed.begin()
                                      : std::max_element(memory.begin(), memory.end()) - memory.begin();
      search(p, needed, std::min(static_cast<std::size_t>(turn), needed.size() - 1), best, m);
    }
    best.put_into(r);
    return r;
  }

 private:
  void search(const problem& p, const std::vector<index_t>& needed, std::size_t turn, incumbent& best, monitor& m) const {
    const auto& ops = p.operations();
    std::vector<bytes_t> made(turn + 1, 0);  // bytes made by the operations before a position
    for (std::size_t k = 0; k < turn; ++k) {
      made[k + 1] = made[k];
      for (auto v : ops[needed[k]].outputs) made[k + 1] += p.values()[v].bytes;
    }
    const std::vector<bool> never(ops.size(), false);
    for (std::size_t count = 1; count <= std::min(options_.tries, turn) && !m.stopped(); ++count)
      for (const bool by_bytes : {false, true}) {
        std::vector<std::size_t> segment(ops.size(), count);  // of an operation; the backward is one more
        for (std::size_t k = 0; k < turn; ++k)
          segment[needed[k]] = by_bytes ? static_cast<std::size_t>(static_cast<double>(made[k]) * static_cast<double>(count) /
                                                                   (static_cast<double>(made[turn]) + 1))
                                        : k * count / turn;
        std::vector<bool> retained(p.values().size(), false);
        for (index_t v = 0; v < retained.size(); ++v) {
          const auto reads = p.consumers(v);
          if (p.is_source(v) || p.is_target(v) || ops[p.producer(v)].once)
            retained[v] = true;
          else
            retained[v] = std::any_of(reads.begin(), reads.end(),
                                      [&](index_t o) { return segment[o] < count && segment[o] != segment[p.producer(v)]; });
        }
        const auto order = order_across(p, needed, needed[turn], retained, never);
        if (order && best.offer(*order)) m.report({.stage = std::to_string(count) + " segments", .best = best.seconds()});
      }
  }

  options options_;
};

}  // namespace remat
