// SPDX-License-Identifier: Apache-2.0
/// @file
/// The blocks of a chain as problems of their own, and the schedules they make together: the ground of rotor and rockmate.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include <remat/chain/persistent_table.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/blocks.hpp>

namespace remat::chain {

/// One block of a chain as a problem of its own, and the ways to run it.
///
/// Between the forward and the backward stands the *boundary*, an operation that reads what the next block reads and yields the
/// gradients that come back. Its workspace bounds what is saved from forward to backward. The block's inputs, held and pinned
/// values occupy nothing here: the chain counts them.
class block_problem {
 public:
  /// A way to run the block, in operations of the whole problem.
  struct option {
    std::vector<operation_id> forward, backward;
    heterogeneous_chain::option needs;
  };

  /// @param p     the whole problem
  /// @param c     its blocks
  /// @param which index of the block
  block_problem(const problem& p, const structure::block_chain& c, std::size_t which) {
    const auto& block = c.blocks[which];
    const bool last = which + 1 == c.blocks.size();
    std::vector<bool> pinned(p.values().size(), false), here(p.operations().size(), false);
    for (auto v : c.pinned) pinned[v] = true;
    const auto elsewhere = [&](operation_id o) {  // computed once, before the block: it yields pinned values only
      const auto& op = p.operations()[o];
      return op.once || std::all_of(op.outputs.begin(), op.outputs.end(), [&](value_id v) { return pinned[v]; });
    };
    for (auto o : block.forward) {
      here[o] = !elsewhere(o);
      if (!here[o]) once_.push_back(o);
    }
    for (auto o : block.backward) here[o] = true;

    std::map<value_id, value_id> local;
    const std::vector<value_id> nothing;
    const auto& incoming = last ? nothing : block.gradients;
    for (auto v : incoming) arrives_ += p.values()[v].bytes;
    const auto arrives = [&](value_id v) { return std::binary_search(incoming.begin(), incoming.end(), v); };
    const auto add = [&](value_id v) {
      const auto [at, added] = local.emplace(v, static_cast<index_t>(values_.size()));
      if (!added) return at->second;
      const bool made = (!p.is_source(v) && here[p.producer(v)]) || arrives(v);
      const bool counted = made && !pinned[v] && !(p.is_target(v) && p.producer(v) < c.backward_start);
      values_.push_back({"", counted ? p.values()[v].bytes : 0, !made});
      return at->second;
    };
    const auto copy = [&](operation_id o) {
      const auto& op = p.operations()[o];
      operation twin{"", {}, {}, op.seconds, op.workspace, op.once};
      for (auto v : op.inputs) twin.inputs.push_back(add(v));
      for (auto v : op.outputs) {
        twin.outputs.push_back(add(v));
        if (p.is_target(v)) targets_.push_back(twin.outputs.back());
      }
      operations_.push_back(std::move(twin));
      global_.push_back(o);
    };
    for (auto o : block.forward)
      if (here[o]) copy(o);
    boundary_ = operations_.size();
    operation boundary;
    if (!last)
      for (auto v : c.blocks[which + 1].inputs) {
        boundary.inputs.push_back(add(v));
        next_.push_back(boundary.inputs.back());
        const bool made = !values_[next_.back()].held;
        if (!made) passing_ += p.values()[v].bytes;  // an input of this block as well
      }
    for (auto v : incoming) boundary.outputs.push_back(add(v));
    boundary.outputs.push_back(static_cast<index_t>(values_.size()));
    targets_.push_back(boundary.outputs.back());
    values_.push_back({"boundary", 0, false});
    boundary.once = true;
    operations_.push_back(boundary);
    global_.push_back(none);
    for (auto o : block.backward) {
      copy(o);
      for (auto v : p.operations()[o].outputs)
        if (p.is_target(v)) kept_ += p.values()[v].bytes;
    }
    if (which > 0)
      for (auto v : c.blocks[which - 1].gradients)
        if (const auto at = local.find(v); at != local.end() && !values_[at->second].held) targets_.push_back(at->second);
    bare_ = with_workspace(0);
  }

  /// The problem with `workspace` bytes needed at the boundary.
  problem with_workspace(bytes_t workspace) const {
    auto ops = operations_;
    ops[boundary_].workspace = workspace;
    return problem("block", values_, ops, targets_);
  }
  const problem& bare() const { return bare_; }
  /// Operations computed once, ahead of the block.
  const std::vector<operation_id>& once() const { return once_; }
  /// Bytes of what the backward leaves until the end.
  bytes_t kept() const { return kept_; }
  /// Bytes made here that the next block reads: no option saves less.
  bytes_t least_saved() const {
    bytes_t sum = 0;
    for (auto v : next_) sum += values_[v].bytes;
    return sum;
  }

  /// Measures an order of the bare problem.
  option measure(const std::vector<operation_id>& order) const {
    const auto needs = measure_order(bare_, order);
    option o;
    bytes_t before = 0, after = 0, saved = 0;
    bool passed = false;
    for (std::size_t k = 0; k < order.size(); ++k) {
      if (order[k] == boundary_) {
        saved = needs.memory[k] - arrives_;
        passed = true;
        continue;
      }
      (passed ? after : before) = std::max(passed ? after : before, needs.memory[k]);
      (passed ? o.needs.backward : o.needs.forward) += operations_[order[k]].seconds;
      (passed ? o.backward : o.forward).push_back(global_[order[k]]);
    }
    o.needs.saved = saved + passing_;
    o.needs.forward_transient = std::max<bytes_t>(0, before - saved);
    o.needs.backward_transient = std::max<bytes_t>(0, after - saved - arrives_);
    return o;
  }
  /// The forward that computes what the next block reads and saves nothing else: order, seconds and transient bytes.
  option checkpoint() const {
    const std::vector<operation> forward(operations_.begin(), operations_.begin() + static_cast<std::ptrdiff_t>(boundary_));
    auto values = values_;
    for (value_id v = 0; v < values.size(); ++v) {
      const auto maker = bare_.producer(v);
      if (maker == none || maker >= boundary_) values[v] = {"", 0, true};
    }
    const problem p("checkpoint", values, forward, next_);
    const auto order = needed_operations(p);
    const auto needs = measure_order(p, order);
    option o;
    for (auto k : order) o.forward.push_back(global_[k]);
    o.needs.forward = needs.seconds;
    o.needs.forward_transient = std::max<bytes_t>(0, needs.peak - least_saved());
    return o;
  }

 private:
  std::vector<value> values_;
  std::vector<operation> operations_;
  std::vector<value_id> targets_, next_;
  std::vector<operation_id> global_, once_;
  std::size_t boundary_ = 0;
  bytes_t arrives_ = 0, kept_ = 0, passing_ = 0;
  problem bare_;
};

/// The blocks of a chain, each saved as a whole or not at all, and what they make together.
class block_joint {
 public:
  using option = block_problem::option;

  /// Every block gets one option: all of it saved.
  block_joint(const problem& p, const structure::block_chain& blocks) : p_(p), blocks_(blocks) {
    const auto n = blocks.blocks.size();
    const auto bytes = [&](const std::vector<value_id>& list) {
      bytes_t sum = 0;
      for (auto v : list) sum += p.values()[v].bytes;
      return sum;
    };
    aside_ = p.held_bytes() + bytes(blocks.pinned);
    for (auto v : p.targets())
      if (!p.is_source(v) && p.producer(v) < blocks.backward_start) aside_ += p.values()[v].bytes;
    chain_.links.resize(n);
    for (std::size_t i = 0; i < n; ++i) {
      problems_.emplace_back(p, blocks, i);
      const auto& b = problems_.back();
      checkpoints_.push_back(b.checkpoint());
      auto& l = chain_.links[i];
      l.input = bytes(blocks.blocks[i].inputs);
      l.gradient = i == 0 ? 0 : bytes(blocks.blocks[i - 1].gradients);
      l.checkpoint_seconds = checkpoints_[i].needs.forward;
      l.checkpoint_transient = checkpoints_[i].needs.forward_transient;
      l.kept = b.kept();
      saved_.push_back(b.measure(needed_operations(b.bare())));
      l.options = {saved_[i].needs};
    }
  }

  const std::vector<block_problem>& problems() const { return problems_; }
  /// Bytes on the device throughout, which the chain does not count.
  bytes_t aside() const { return aside_; }
  /// The chain; each link has one option.
  const heterogeneous_chain& links() const { return chain_; }

  /// The operations behind the steps of a schedule of the chain.
  /// Complexity: O(values + edges executed).
  std::vector<operation_id> order(const std::vector<chain_step>& steps) const {
    std::vector<operation_id> order;
    std::vector<bool> entered(problems_.size(), false);
    const auto append = [&](const std::vector<operation_id>& ops) { order.insert(order.end(), ops.begin(), ops.end()); };
    for (const auto& s : steps) {
      if (!entered[s.link]) append(ahead(s.link));
      entered[s.link] = true;
      switch (s.what) {
        case chain_step::kind::checkpoint:
          append(checkpoints_[s.link].forward);
          break;
        case chain_step::kind::forward:
          append(saved_[s.link].forward);
          break;
        case chain_step::kind::backward:
          append(saved_[s.link].backward);
          break;
      }
    }
    return prune_order(p_, order);
  }

 private:
  /// What is computed once at the beginning of block i, with what that needs.
  std::vector<operation_id> ahead(std::size_t i) const {
    std::vector<operation_id> ops;
    std::vector<bool> wanted(p_.values().size(), false);
    for (auto o : problems_[i].once())
      for (auto v : p_.operations()[o].outputs) wanted[v] = true;
    const auto& forward = blocks_.blocks[i].forward;
    for (auto k = forward.size(); k-- > 0;) {
      const auto& op = p_.operations()[forward[k]];
      if (std::none_of(op.outputs.begin(), op.outputs.end(), [&](value_id v) { return wanted[v]; })) continue;
      for (auto v : op.inputs) wanted[v] = true;
      ops.push_back(forward[k]);
    }
    std::reverse(ops.begin(), ops.end());
    return ops;
  }

  const problem& p_;
  const structure::block_chain& blocks_;
  std::vector<block_problem> problems_;
  std::vector<option> saved_, checkpoints_;  // of each block
  heterogeneous_chain chain_;
  bytes_t aside_ = 0;
};

}  // namespace remat::chain
