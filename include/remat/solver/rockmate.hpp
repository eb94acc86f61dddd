// SPDX-License-Identifier: Apache-2.0
/// @file
/// Two-level rematerialization: blocks by any solver, their chain by dynamic programming. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/bound/min_cut.hpp>
#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/graph/chain.hpp>
#include <remat/solver/chain_table.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// One block of a chain as a problem of its own, and ways to run it.
///
/// Between the forward and the backward stands the *turn*, an operation that reads what the next block reads and yields the
/// gradients that come back. Its workspace bounds what is saved from forward to backward. The block's inputs, held and pinned
/// values occupy nothing here: the chain counts them.
class block_problem {
 public:
  /// A way to run the block, in operations of the whole problem.
  struct option {
    std::vector<index_t> forward, backward;
    chain::option needs;
  };

  /// @param p     the whole problem
  /// @param c     its blocks
  /// @param which index of the block
  block_problem(const problem& p, const block_chain& c, std::size_t which) {
    const auto& block = c.blocks[which];
    const bool last = which + 1 == c.blocks.size();
    std::vector<bool> pinned(p.values().size(), false), here(p.operations().size(), false);
    for (auto v : c.pinned) pinned[v] = true;
    const auto elsewhere = [&](index_t o) {  // computed once, before the block: it yields pinned values only
      const auto& op = p.operations()[o];
      return op.once || std::all_of(op.outputs.begin(), op.outputs.end(), [&](index_t v) { return pinned[v]; });
    };
    for (auto o : block.forward) {
      here[o] = !elsewhere(o);
      if (!here[o]) once_.push_back(o);
    }
    for (auto o : block.backward) here[o] = true;

    std::map<index_t, index_t> local;
    const std::vector<index_t> nothing;
    const auto& incoming = last ? nothing : block.gradients;
    for (auto v : incoming) arrives_ += p.values()[v].bytes;
    const auto from_turn = [&](index_t v) { return std::binary_search(incoming.begin(), incoming.end(), v); };
    const auto add = [&](index_t v) {
      const auto [at, added] = local.emplace(v, static_cast<index_t>(values_.size()));
      if (!added) return at->second;
      const bool made = (!p.is_source(v) && here[p.producer(v)]) || from_turn(v);
      const bool counted = made && !pinned[v] && !(p.is_target(v) && p.producer(v) < c.turn);
      values_.push_back({"", counted ? p.values()[v].bytes : 0, !made});
      return at->second;
    };
    const auto copy = [&](index_t o) {
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
    turn_ = operations_.size();
    operation turn;
    if (!last)
      for (auto v : c.blocks[which + 1].inputs) {
        turn.inputs.push_back(add(v));
        next_.push_back(turn.inputs.back());
        const bool made = !values_[next_.back()].held;
        if (!made) passing_ += p.values()[v].bytes;  // an input of this block as well
      }
    for (auto v : incoming) turn.outputs.push_back(add(v));
    turn.outputs.push_back(static_cast<index_t>(values_.size()));
    targets_.push_back(turn.outputs.back());
    values_.push_back({"turn", 0, false});
    turn.once = true;
    operations_.push_back(turn);
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

  /// The problem with `workspace` bytes needed at the turn.
  problem with_workspace(bytes_t workspace) const {
    auto ops = operations_;
    ops[turn_].workspace = workspace;
    return problem("block", values_, ops, targets_);
  }
  const problem& bare() const { return bare_; }
  std::size_t turn() const { return turn_; }
  /// Operations computed once, ahead of the block.
  const std::vector<index_t>& once() const { return once_; }
  /// Bytes of the gradients that come in at the turn, and of what the backward leaves until the end.
  bytes_t arriving() const { return arrives_; }
  bytes_t kept() const { return kept_; }
  /// Bytes made here that the next block reads: no option saves less.
  bytes_t least_saved() const {
    bytes_t sum = 0;
    for (auto v : next_) sum += values_[v].bytes;
    return sum;
  }

  /// Measures an order of the bare problem.
  option measure(const std::vector<index_t>& order) const {
    const auto needs = measure_order(bare_, order);
    option o;
    bytes_t before = 0, after = 0, saved = 0;
    bool turned = false;
    for (std::size_t k = 0; k < order.size(); ++k) {
      if (order[k] == turn_) {
        saved = needs.memory[k] - arrives_;
        turned = true;
        continue;
      }
      (turned ? after : before) = std::max(turned ? after : before, needs.memory[k]);
      (turned ? o.needs.backward : o.needs.forward) += operations_[order[k]].seconds;
      (turned ? o.backward : o.forward).push_back(global_[order[k]]);
    }
    o.needs.saved = saved + passing_;
    o.needs.forward_transient = std::max<bytes_t>(0, before - saved);
    o.needs.backward_transient = std::max<bytes_t>(0, after - saved - arrives_);
    return o;
  }
  /// The forward that computes what the next block reads and saves nothing else: order, seconds and transient bytes.
  option checkpoint() const {
    const std::vector<operation> forward(operations_.begin(), operations_.begin() + static_cast<std::ptrdiff_t>(turn_));
    auto values = values_;
    for (index_t v = 0; v < values.size(); ++v) {
      const auto maker = bare_.producer(v);
      if (maker == none || maker >= turn_) values[v] = {"", 0, true};
    }
    const problem p("checkpoint", values, forward, next_);
    const auto order = plain_order(p);
    const auto needs = measure_order(p, order);
    option o;
    for (auto k : order) o.forward.push_back(global_[k]);
    o.needs.forward = needs.seconds;
    o.needs.forward_transient = std::max<bytes_t>(0, needs.peak - least_saved());
    return o;
  }
  /// The same ways to run, for a block that equals this one.
  option translate(const option& o, const block_problem& from) const {
    std::map<index_t, index_t> place;
    for (std::size_t k = 0; k < global_.size(); ++k) place[from.global_[k]] = global_[k];
    option twin = o;
    for (auto& x : twin.forward) x = place[x];
    for (auto& x : twin.backward) x = place[x];
    twin.needs.saved += passing_ - from.passing_;
    return twin;
  }
  /// Same structure, costs and sizes.
  friend bool operator==(const block_problem& a, const block_problem& b) {
    const auto same_value = [](const value& x, const value& y) { return x.bytes == y.bytes && x.held == y.held; };
    const auto same_operation = [](const operation& x, const operation& y) {
      return x.inputs == y.inputs && x.outputs == y.outputs && x.seconds == y.seconds && x.workspace == y.workspace &&
             x.once == y.once;
    };
    return a.turn_ == b.turn_ && a.targets_ == b.targets_ && a.next_ == b.next_ &&
           std::equal(a.values_.begin(), a.values_.end(), b.values_.begin(), b.values_.end(), same_value) &&
           std::equal(a.operations_.begin(), a.operations_.end(), b.operations_.begin(), b.operations_.end(), same_operation);
  }

 private:
  std::vector<value> values_;
  std::vector<operation> operations_;
  std::vector<index_t> targets_, next_, global_, once_;
  std::size_t turn_ = 0;
  bytes_t arrives_ = 0, kept_ = 0, passing_ = 0;
  problem bare_;
};

/// Cuts the graph into a chain of blocks, asks another solver for several ways to run each block, joins them by the dynamic
/// program of `chain_table`, and improves the whole: what can be retained is. Equal blocks are solved once.
///
/// The program's memory model is cautious and `evaluate` exact, so several budgets of the program are tried, above the real one
/// too, and what does not fit is played with `eviction`. The schedules of `min_cut` compete; the fastest that fits wins. Where
/// the graph has no chain it is one block. Copies to the host are not used.
///
/// @tparam Inner the solver of the blocks, such as `checkmate<highs::backend>`
///
/// Complexity: that of `min_cut`, plus `saved` * `peaks` calls of Inner per distinct block, plus that of `chain_table`.
///
/// Reference: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
/// re-materialization in PyTorch", ICML 2023.
/// @code
/// remat::rockmate method(remat::checkmate<remat::highs::backend>(remat::checkmate<remat::highs::backend>::options::fast()));
/// auto r = remat::solve(p, budget, method, {.seconds = 30});
/// @endcode
template <solver Inner = min_cut>
class rockmate {
 public:
  struct options {
    block_options blocks = {};           ///< how the graph is cut
    std::size_t saved = 6;               ///< bounds on what a block saves that are tried, >= 1
    std::size_t peaks = 3;               ///< bounds on a block's peak that are tried, >= 1
    std::size_t inner_operations = 120;  ///< blocks of more operations are given to `min_cut`
    std::size_t whole_operations = 60;   ///< problems of at most so many operations are given to Inner as a whole too
    std::size_t slots = 2000;            ///< of `chain_table`
    min_cut::options cut = {};           ///< of the competing `min_cut`
  };

  rockmate() : rockmate(Inner()) {}
  explicit rockmate(Inner inner) : rockmate(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  rockmate(Inner inner, const options& o) : inner_(std::move(inner)), options_(o) {
    if (o.saved < 1) throw bad_option("rockmate.saved must be >= 1, got 0");
    if (o.peaks < 1) throw bad_option("rockmate.peaks must be >= 1, got 0");
  }

  std::string name() const { return "rockmate/" + std::string(inner_.name()); }

  /// @throws bad_option if the options of the blocks are out of range; what Inner throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    incumbent best(p, budget);
    result r;
    if (best.offer(plain_order(p))) {
      best.put_into(r);
      return r;
    }
    {
      monitor first(share(m, 0.3), [&](const progress& now) {
        m.report(now);
        return m.stop_requested() ? control::stop : control::go_on;
      });
      r = min_cut(options_.cut).solve(p, budget, first);
    }
    if (r.status == status::infeasible) return r;
    if (r.found()) best.offer(compute_order(r.schedule));
    const auto good_enough = [&] { return best.found() && best.seconds() * (1 - m.limits().gap) <= r.bound; };
    if (!good_enough() && !m.stopped()) join_blocks(p, budget, best, m, r.bound);
    if (!good_enough() && !m.stopped() && p.operations().size() <= options_.whole_operations) {
      const auto whole = remat::solve(p, budget, inner_, share(m, 1));
      if (whole.found()) best.offer(compute_order(whole.schedule));
    }
    best.put_into(r);
    return r;
  }

 private:
  using option = block_problem::option;

  static limits share(const monitor& m, double part) {
    auto l = m.limits();
    l.seconds = m.remaining() * part;
    return l;
  }

  /// Ways to run a block: those of Inner and of `min_cut` under several bounds, without the dominated ones.
  std::vector<option> block_options_for(const block_problem& b, const limits& each, const monitor& m) const {
    const auto plain = b.measure(plain_order(b.bare()));
    const auto peak = measure_order(b.bare(), plain_order(b.bare())).peak;
    const auto floor = bounds_without_search(b.bare()).budget;
    const auto least = b.least_saved(), most = std::max(plain.needs.saved, least);
    std::vector<option> found = {plain};
    const bool small = b.bare().operations().size() <= options_.inner_operations;
    for (std::size_t i = 0; i < options_.peaks; ++i)
      for (std::size_t j = 0; j <= options_.saved && !m.stopped(); ++j) {
        if (i == 0 && j == 0) continue;  // the plain order
        const double part = 1 - static_cast<double>(i) / static_cast<double>(options_.peaks);
        const auto within = floor + static_cast<bytes_t>(part * static_cast<double>(peak - floor));
        const auto saved = least + static_cast<bytes_t>((1 - static_cast<double>(j) / static_cast<double>(options_.saved)) *
                                                        static_cast<double>(most - least));
        const auto limited = b.with_workspace(std::max<bytes_t>(0, within - b.arriving() - saved));
        const auto add = [&](const result& r) {
          if (r.found()) found.push_back(b.measure(compute_order(r.schedule)));
        };
        add(remat::solve(limited, within, min_cut({.bound = false}), each));
        if constexpr (!std::is_same_v<Inner, min_cut>)
          if (small) add(remat::solve(limited, within, inner_, each));
      }
    const auto better = [](const chain::option& a, const chain::option& x) {
      return a.saved <= x.saved && a.saved + a.forward_transient <= x.saved + x.forward_transient &&
             a.saved + a.backward_transient <= x.saved + x.backward_transient && a.forward + a.backward <= x.forward + x.backward;
    };
    std::vector<option> front;
    for (std::size_t i = 0; i < found.size(); ++i) {
      bool dominated = false;
      for (std::size_t k = 0; k < found.size() && !dominated; ++k)
        dominated = k != i && better(found[k].needs, found[i].needs) && (k < i || !better(found[i].needs, found[k].needs));
      if (!dominated) front.push_back(found[i]);
    }
    return front;
  }

  void join_blocks(const problem& p, bytes_t budget, incumbent& best, monitor& m, double bound) const {
    const auto blocks = find_blocks(p, options_.blocks);
    const auto n = blocks.blocks.size();
    if (n < 2) return;
    const auto stop = [&] { return m.stopped(); };

    std::vector<block_problem> problems;
    for (std::size_t i = 0; i < n; ++i) problems.emplace_back(p, blocks, i);
    std::vector<std::size_t> twin(n);
    std::size_t distinct = 0;
    for (std::size_t i = 0; i < n; ++i) {
      twin[i] = 0;
      while (!(problems[twin[i]] == problems[i])) ++twin[i];
      distinct += twin[i] == i;
    }
    auto each = share(m, 0.6 / static_cast<double>(distinct * options_.peaks * (options_.saved + 1)));
    each.gap = std::max(each.gap, 1e-3);

    chain c;
    std::vector<std::vector<option>> ways(n);
    std::vector<option> fast(n);
    bytes_t aside = p.held_bytes();  // on the device throughout
    for (auto v : blocks.pinned) aside += p.values()[v].bytes;
    for (auto v : p.targets())
      if (!p.is_source(v) && p.producer(v) < blocks.turn) aside += p.values()[v].bytes;
    const auto bytes = [&](const std::vector<index_t>& list) {
      bytes_t sum = 0;
      for (auto v : list) sum += p.values()[v].bytes;
      return sum;
    };
    for (std::size_t i = 0; i < n; ++i) {
      m.report({.stage = "block " + std::to_string(i + 1) + " of " + std::to_string(n), .best = best.seconds(), .bound = bound});
      if (m.stopped()) return;
      if (twin[i] == i)
        ways[i] = block_options_for(problems[i], each, m);
      else
        for (const auto& o : ways[twin[i]]) ways[i].push_back(problems[i].translate(o, problems[twin[i]]));
      fast[i] = problems[i].checkpoint();
      chain::link l;
      l.input = bytes(blocks.blocks[i].inputs);
      l.gradient = i == 0 ? 0 : bytes(blocks.blocks[i - 1].gradients);
      l.checkpoint_seconds = fast[i].needs.forward;
      l.checkpoint_transient = fast[i].needs.forward_transient;
      l.kept = problems[i].kept();
      for (const auto& o : ways[i]) l.options.push_back(o.needs);
      c.links.push_back(std::move(l));
    }

    const auto most = std::max<bytes_t>(0, budget - aside) + (budget - p.held_bytes()) / 3;
    const chain_table table(c, most, {.slots = options_.slots, .stop = stop});
    if (!table.complete()) return;
    std::vector<std::vector<index_t>> over;
    std::vector<chain_step> before;
    for (int k = 0; k <= 48 && !m.stopped(); ++k) {
      const auto within = most - static_cast<bytes_t>(static_cast<double>(most) * k / 72);
      if (!table.seconds(within)) break;
      const auto steps = table.steps(within);
      if (steps == before) continue;
      before = steps;
      auto order = assemble(p, blocks, problems, ways, fast, steps);
      const auto needs = measure_order(p, order);
      if (needs.peak > budget) {
        if (needs.seconds < best.seconds()) over.push_back(std::move(order));
        continue;
      }
      if (needs.seconds < best.seconds() * 1.02 || !best.found())
        if (best.offer(retain_more(p, std::move(order), budget, stop)))
          m.report({.stage = "chain of blocks", .best = best.seconds(), .bound = bound});
    }
    for (std::size_t i = over.size(); i-- > 0 && !m.stopped();)
      for (const double distance : {1.0, 0.5, 2.0}) {
        auto order = eviction(p, over[i]).run(budget, {.distance = distance}, stop);
        if (order && measure_order(p, *order).seconds < best.seconds() * 1.02 &&
            best.offer(retain_more(p, std::move(*order), budget, stop)))
          m.report({.stage = "chain of blocks", .best = best.seconds(), .bound = bound});
      }
  }

  /// The operations behind the steps of a chain.
  static std::vector<index_t> assemble(const problem& p, const block_chain& blocks, const std::vector<block_problem>& problems,
                                       const std::vector<std::vector<option>>& ways, const std::vector<option>& fast,
                                       const std::vector<chain_step>& steps) {
    std::vector<index_t> order;
    std::vector<bool> entered(problems.size(), false);
    const auto append = [&](const std::vector<index_t>& ops) { order.insert(order.end(), ops.begin(), ops.end()); };
    for (const auto& s : steps) {
      if (!entered[s.link] && !problems[s.link].once().empty()) {  // what is computed once, with what it needs
        std::vector<bool> wanted(p.values().size(), false);
        for (auto o : problems[s.link].once())
          for (auto v : p.operations()[o].outputs) wanted[v] = true;
        std::vector<index_t> ahead;
        const auto& forward = blocks.blocks[s.link].forward;
        for (auto k = forward.size(); k-- > 0;) {
          const auto& op = p.operations()[forward[k]];
          if (std::none_of(op.outputs.begin(), op.outputs.end(), [&](index_t v) { return wanted[v]; })) continue;
          for (auto v : op.inputs) wanted[v] = true;
          ahead.push_back(forward[k]);
        }
        std::reverse(ahead.begin(), ahead.end());
        append(ahead);
      }
      entered[s.link] = true;
      switch (s.what) {
        case chain_step::kind::checkpoint:
          append(fast[s.link].forward);
          break;
        case chain_step::kind::forward:
          append(ways[s.link][s.option].forward);
          break;
        case chain_step::kind::backward:
          append(ways[s.link][s.option].backward);
          break;
      }
    }
    return prune_order(p, order);
  }

  Inner inner_;
  options options_;
};

}  // namespace remat
