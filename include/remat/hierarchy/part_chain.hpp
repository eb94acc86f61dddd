// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parts as the links of a chain, for the dynamic program.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <remat/chain/persistent_table.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/hierarchy/condensed_problem.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/order/replay.hpp>
#include <remat/structure/partition.hpp>

namespace remat::hierarchy {

/// Nested parts with their options, seen as a `chain`: part i reads what part i - 1 made. Values that are read further away
/// (skip connections, masks) count as if they were there throughout. So the chain is a model of the problem, exact where it is a
/// chain; what its schedules really need is for `measure_order` to say.
class part_chain {
 public:
  /// @param p     the problem
  /// @param index of the parts
  /// @param parts nested, as from `find_partition`
  /// @param options of each part; must outlive this
  /// Complexity: O(values + edges, those of recomputations in the options included).
  part_chain(const problem& p, const part_index& index, const structure::partition& parts,
             const std::vector<part_options>& options)
      : p_(p), options_(options) {
    const auto n = static_cast<part_id>(parts.size());
    aside_ = p.held_bytes();
    chain_.links.resize(n);
    std::vector<bool> backward(p.operations().size(), false);
    for (const auto& piece : parts)
      for (auto o : piece.backward) backward[o] = true;
    for (value_id v = 0; v < p.values().size(); ++v) {
      if (p.is_source(v) || !index.leaves(v)) continue;
      const auto o = p.producer(v);
      const auto i = index.part(o);
      const auto bytes = p.values()[v].bytes;
      const auto next = backward[o] ? i - 1 : i + 1;
      const auto readers = p.consumers(v);
      const bool near = i != none && next < n && !p.is_target(v) &&
                        std::all_of(readers.begin(), readers.end(),
                                    [&](operation_id r) { return index.part(r) == i || index.part(r) == next; });
      if (near)
        (backward[o] ? chain_.links[i].gradient : chain_.links[next].input) += bytes;
      else if (i != none && backward[o] && p.is_target(v))
        chain_.links[i].kept += bytes;
      else
        aside_ += bytes;
    }
    for (part_id i = 0; i < n; ++i) {
      auto& l = chain_.links[i];
      const auto out = i + 1 < n ? chain_.links[i + 1].input : 0;
      for (const auto& w : options[i].list) {
        const double forward = seconds(w.forward);
        l.options.push_back(
            {w.saved + out, forward, w.seconds - forward, w.forward_workspace, w.backward_workspace + l.gradient + l.kept});
      }
      l.checkpoint_seconds = options[i].checkpoint.seconds;
      l.checkpoint_transient = options[i].checkpoint.forward_workspace;
    }
  }

  const chain::heterogeneous_chain& links() const { return chain_; }
  /// Bytes on the device throughout, which the chain does not count.
  bytes_t aside() const { return aside_; }

  /// The operations behind the steps of a schedule of the chain, and those in no part where they are needed.
  /// Complexity: O((values + edges executed) log).
  std::vector<operation_id> order(const std::vector<chain::chain_step>& steps) const {
    std::vector<operation_id> all;
    std::vector<bool> there(p_.values().size(), false);
    for (value_id v = 0; v < there.size(); ++v) there[v] = p_.is_source(v);
    order::missing_operations missing(p_);
    const auto run = [&](operation_id first) {
      for (auto o : missing.for_operation(first, there)) {
        all.push_back(o);
        for (auto v : p_.operations()[o].outputs) there[v] = true;
      }
    };
    for (const auto& s : steps) {
      const auto& w = s.what == chain::chain_step::kind::checkpoint ? options_[s.link].checkpoint.forward
                      : s.what == chain::chain_step::kind::forward  ? options_[s.link].list[s.option].forward
                                                                    : options_[s.link].list[s.option].backward;
      for (auto o : w) run(o);
    }
    for (auto v : p_.targets())
      if (!there[v]) run(p_.producer(v));
    return prune_order(p_, all);
  }

 private:
  double seconds(const std::vector<operation_id>& order) const {
    double sum = 0;
    for (auto o : order) sum += p_.operations()[o].seconds;
    return sum;
  }
  const problem& p_;
  const std::vector<part_options>& options_;
  chain::heterogeneous_chain chain_;
  bytes_t aside_ = 0;
};

}  // namespace remat::hierarchy
