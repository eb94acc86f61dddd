// SPDX-License-Identifier: Apache-2.0
/// @file
/// Binomial checkpointing of chains, and a dynamic program for unequal blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/binomial.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/hierarchy/part_chain.hpp>
#include <remat/structure/partition.hpp>

namespace remat {

/// Checkpoints a chain of blocks: stores only inputs of blocks, and recomputes a block right before its backward. Blocks of equal
/// cost follow the binomial rule, with as many slots as fit. Unequal blocks are planned by dynamic programming. The fastest
/// schedule that fits is taken. `rotor` may also save the inside of a block, and does at least as well on most networks.
///
/// A graph without a chain is one block: there is a schedule only if store-all fits, and the status is `not_applicable`
/// otherwise.
///
/// Complexity: that of `find_partition` and of `persistent_table`, and O(log(blocks) (values + edges executed)).
///
/// Reference: Griewank, Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
/// @code
/// auto r = remat::solve(p, budget, remat::revolve{});
/// @endcode
class revolve {
 public:
  struct options {
    structure::partition_options blocks = {
        .size = 1, .most = 4000, .interface = 1};  ///< how the graph is cut for the binomial rule
    std::size_t links = 128;  ///< most blocks for the dynamic program, in [1, 2000]; the graph is cut anew for it
    std::size_t slots = 500;  ///< units of memory of the dynamic program, in [1, 10 000]
  };

  revolve() : revolve(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit revolve(const options& o) : options_(o) {
    if (o.links < 1 || o.links > chain::persistent_table::max_links)
      throw bad_option("revolve.links must be in [1, " + std::to_string(chain::persistent_table::max_links) + "], got " +
                       std::to_string(o.links));
    if (o.slots < 1 || o.slots > 10'000) throw bad_option("revolve.slots must be in [1, 10000], got " + std::to_string(o.slots));
  }

  std::string name() const { return "revolve"; }

  /// @throws bad_option if the options of the blocks are out of range
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    incumbent best(p, budget);
    if (!best.offer(needed_operations(p))) {
      const auto blocks = structure::find_partition(p, options_.blocks, m.stop_check());
      const auto n = blocks.size();
      m.report({.stage = n < 2 ? structure::no_chain : "chain of " + std::to_string(n) + " blocks"});
      if (n < 2) {
        r = refused(structure::no_chain);
      } else {
        plan_binomial(p, blocks, best, m);
        auto cut = options_.blocks;
        cut.most = std::min(cut.most, options_.links);
        for (std::size_t before = 0; !m.stopped(); cut.size *= 2) {
          const auto links = structure::find_partition(p, cut, m.stop_check());
          if (links.size() < 2) break;
          if (links.size() != std::exchange(before, links.size())) plan_unequal(p, budget, links, best, m);
        }
      }
    }
    best.put_into(r);
    return r;
  }

 private:
  static constexpr std::uint64_t max_steps = 10'000'000;  ///< most forward runs of blocks; longer schedules are useless

  /// Moves operations at the beginning of a block's backward into the backward of the next block, if they read from the block's
  /// own forward only values that the forward of the next block reads as well. Nothing has to be recomputed for them then.
  static structure::partition with_early_backward(const problem& p, structure::partition blocks) {
    const auto contains = [](const std::vector<operation_id>& list, operation_id o) {
      return std::binary_search(list.begin(), list.end(), o);
    };
    for (auto i = blocks.size() - 1; i-- > 0;) {
      auto& backward = blocks[i].backward;
      auto& after = blocks[i + 1];
      const auto available = [&](value_id v) {
        const auto readers = p.consumers(v);
        return p.is_source(v) || !contains(blocks[i].forward, p.producer(v)) ||
               std::any_of(readers.begin(), readers.end(), [&](operation_id o) { return contains(after.forward, o); });
      };
      const auto end = std::find_if_not(backward.begin(), backward.end(), [&](operation_id o) {
        const auto& inputs = p.operations()[o].inputs;
        return std::all_of(inputs.begin(), inputs.end(), available);
      });
      after.backward.insert(after.backward.end(), backward.begin(), end);
      backward.erase(backward.begin(), end);
    }
    return blocks;
  }

  static void plan_binomial(const problem& p, const structure::partition& blocks, incumbent& best, monitor& m) {
    const hierarchy::saved_parts parts(p, with_early_backward(p, blocks));
    const auto n = parts.size();
    // The most slots that fit, by bisection: more slots take more memory and less time.
    const auto fits = [&](std::size_t slots) {
      const auto known = best.seconds();
      if (chain::revolve_forwards(n, slots) > max_steps) return false;
      const auto order = parts.chain().order(chain::revolve_schedule(n, slots));
      if (best.offer(order)) best.report(m, std::to_string(slots) + " slots");
      return best.seconds() < known;
    };
    std::size_t low = 1, high = n;
    while (low <= high && !m.stopped()) {
      const auto middle = low + (high - low) / 2;
      if (fits(middle))
        low = middle + 1;
      else
        high = middle - 1;
    }
  }

  void plan_unequal(const problem& p, bytes_t budget, const structure::partition& blocks, incumbent& best, monitor& m) const {
    const hierarchy::saved_parts parts(p, with_early_backward(p, blocks));
    // The table counts memory too high, so schedules for somewhat larger budgets are evaluated as well.
    const auto table_budget = std::max<bytes_t>(0, budget - parts.chain().unmodelled_bytes()) + (budget - p.held_bytes()) / 4;
    const chain::persistent_table table(parts.chain().model(), table_budget,
                                        {.slots = options_.slots, .stop = m.stop_check(), .inputs_only = true});
    const auto front = table.front();
    std::size_t remaining_tries = 40;
    for (auto point = front.rbegin(); point != front.rend() && remaining_tries > 0 && !m.stopped(); ++point) {
      if (best.offer(parts.chain().order(table.steps(point->first)))) best.report(m, "unequal blocks");
      if (best.found()) --remaining_tries;
    }
  }

  options options_;
};

}  // namespace remat
