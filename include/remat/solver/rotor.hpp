// SPDX-License-Identifier: Apache-2.0
/// @file
/// Optimal checkpointing of chains.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/graph/chain.hpp>
#include <remat/solver/block_problem.hpp>
#include <remat/solver/chain_table.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// The fastest persistent schedule of a network that is a chain of blocks: each block is saved as a whole, or computed again from
/// a checkpoint. The dynamic program of `chain_table`, whose memory model is cautious: schedules for somewhat larger budgets are
/// evaluated as well and the fastest that fits is taken.
///
/// A graph without a chain is one block, of which nothing can be computed again; then there is a schedule only if store-all
/// fits, and the progress reports say so.
///
/// Complexity: that of `find_blocks` and of `chain_table`.
///
/// Reference: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", INRIA RR-9302
/// (2019).
/// @code
/// auto r = remat::solve(p, budget, remat::rotor{});
/// @endcode
class rotor {
 public:
  struct options {
    block_options blocks = {.most = 128, .least = 1};  ///< how the graph is cut
    std::size_t slots = 2000;                          ///< of `chain_table`; 0: exact in bytes
  };

  rotor() : rotor(options{}) {}
  explicit rotor(const options& o) : options_(o) {}

  std::string name() const { return "rotor"; }

  /// @throws bad_option if the options of the blocks are out of range
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    incumbent best(p, budget);
    if (!best.offer(needed_operations(p))) {
      const auto blocks = find_blocks(p, options_.blocks);
      const auto n = blocks.blocks.size();
      m.report({.stage = n < 2 ? "the graph has no chain of blocks" : "chain of " + std::to_string(n) + " blocks"});
      if (n > 1) search(p, budget, blocks, best, m);
    }
    best.put_into(r);
    return r;
  }

 private:
  void search(const problem& p, bytes_t budget, const block_chain& blocks, incumbent& best, monitor& m) const {
    const block_joint joint(p, blocks);
    const auto most = std::max<bytes_t>(0, budget - joint.aside()) + (budget - p.held_bytes()) / 4;
    const chain_table table(joint.links(), most, {.slots = options_.slots, .stop = [&] { return m.stopped(); }});
    if (!table.complete()) return;
    const auto front = table.front();
    // Fastest first. What the table takes to be a little slower may be faster once evaluated, so the search goes on for a while.
    std::size_t more = 40;
    for (auto at = front.rbegin(); at != front.rend() && more > 0 && !m.stopped(); ++at) {
      best.offer(joint.order(table.steps(at->first)));
      if (best.found()) --more;
    }
  }

  options options_;
};

}  // namespace remat
