// SPDX-License-Identifier: Apache-2.0
/// @file
/// A checkpoint around every block of a network.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/backward_start.hpp>
#include <remat/structure/partition.hpp>

namespace remat {

/// Keeps the values that pass from block to block of the forward. When the backward reaches a block, runs its forward once more,
/// from its beginning to the last value that is read: `torch.utils.checkpoint` around every block. Gives the same schedule for
/// every budget, unless store-all fits.
///
/// For graphs of any shape. Results of once-only operations are kept.
///
/// Complexity: that of `find_partition`, or O(values + edges) with `options::cuts`.
/// @code
/// auto r = remat::solve(p, budget, remat::recompute_all_blocks{});
/// auto t = remat::solve(p, budget, remat::recompute_all_blocks({.cuts = {12, 24, 36}}));  // four blocks
/// @endcode
class recompute_all_blocks {
 public:
  struct options {
    structure::partition_options blocks = {.size = 8, .most = 48, .interface = 1};  ///< how the graph is cut
    std::vector<operation_id> cuts = {};  ///< instead of `blocks`: first operations of the second, third, ... block, ascending
    bool keep_last = false;               ///< keep the last block, instead of running it again
  };

  recompute_all_blocks() : recompute_all_blocks(options{}) {}
  /// @throws bad_option if `cuts` are not ascending
  explicit recompute_all_blocks(const options& o) : options_(o) {
    for (std::size_t i = 1; i < o.cuts.size(); ++i)
      if (o.cuts[i] <= o.cuts[i - 1])
        throw bad_option("recompute_all_blocks.cuts[" + std::to_string(i) + "] must be above " + std::to_string(o.cuts[i - 1]) +
                         ", got " + std::to_string(o.cuts[i]));
  }

  std::string name() const { return "recompute_all_blocks"; }

  /// @throws bad_option if a cut or `blocks.backward_start` is no operation, or the options of the blocks are out of range
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    const auto n = p.operations().size();
    if (!options_.cuts.empty() && options_.cuts.back() >= n)
      throw bad_option("recompute_all_blocks.cuts: no operation " + std::to_string(options_.cuts.back()));
    if (options_.blocks.backward_start && *options_.blocks.backward_start >= n)
      throw bad_option("recompute_all_blocks.blocks.backward_start: no operation " +
                       std::to_string(*options_.blocks.backward_start));
    result r;
    const auto needed = needed_operations(p);
    incumbent best(p, budget);
    if (!best.offer(needed) && !needed.empty()) best.offer(order(p, needed, blocks(p, needed, m)));
    best.put_into(r);
    return r;
  }

 private:
  using operations = std::vector<operation_id>;

  /// The operations in the forward of each block.
  std::vector<operations> blocks(const problem& p, const operations& needed, const monitor& m) const {
    std::vector<operations> list;
    if (options_.cuts.empty()) {
      for (auto& b : structure::find_partition(p, options_.blocks, m.stop_check())) list.push_back(std::move(b.forward));
    } else {
      const auto begin = needed[structure::backward_start(p, needed, options_.blocks.backward_start)];
      list.resize(options_.cuts.size() + 1);
      for (auto o : needed)
        if (o < begin)
          list[static_cast<std::size_t>(std::upper_bound(options_.cuts.begin(), options_.cuts.end(), o) - options_.cuts.begin())]
              .push_back(o);
    }
    std::erase_if(list, [](const operations& b) { return b.empty(); });
    return list;
  }

  operations order(const problem& p, const operations& needed, const std::vector<operations>& blocks) const {
    const auto& ops = p.operations();
    if (blocks.empty()) return needed;
    const auto backward = blocks.size(), alone = backward + 1;
    std::vector<std::size_t> block(ops.size(), backward);  // per operation
    std::fill_n(block.begin(), blocks.back().back(), alone);
    for (std::size_t i = 0; i < blocks.size(); ++i)
      for (auto o : blocks[i]) block[o] = i;
    // Recompute the values that only their own block and the backward read.
    std::vector<bool> missing(p.values().size(), false), asked(p.values().size(), false);
    for (value_id v = 0; v < missing.size(); ++v) {
      if (p.is_source(v) || p.is_target(v) || ops[p.producer(v)].once) continue;
      const auto own = block[p.producer(v)];
      if (own >= backward || (options_.keep_last && own + 1 == backward)) continue;
      const auto reads = p.consumers(v);
      missing[v] =
          std::all_of(reads.begin(), reads.end(), [&](operation_id o) { return block[o] == own || block[o] == backward; });
      asked[v] = missing[v] && std::any_of(reads.begin(), reads.end(), [&](operation_id o) { return block[o] == backward; });
    }
    operations order;
    for (auto o : needed) {
      if (block[o] == backward)
        for (auto v : ops[o].inputs) {
          if (!missing[v]) continue;
          const auto& again = blocks[block[p.producer(v)]];
          auto end = again.size();
          const auto wanted = [&](value_id x) { return asked[x]; };
          while (std::none_of(ops[again[end - 1]].outputs.begin(), ops[again[end - 1]].outputs.end(), wanted)) --end;
          for (std::size_t k = 0; k < end; ++k) {
            if (ops[again[k]].once) continue;
            order.push_back(again[k]);
            for (auto x : ops[again[k]].outputs) missing[x] = false;
          }
        }
      order.push_back(o);
    }
    return order;
  }

  options options_;
};

}  // namespace remat
