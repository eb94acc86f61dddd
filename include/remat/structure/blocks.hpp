// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recognises the chain of blocks in the joint forward and backward graph of a network.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/backward_start.hpp>

namespace remat::structure {

/// A network cut into blocks: block i is a run of forward operations and the run of backward operations that reads what they
/// made.
struct block_chain {
  struct block {
    std::vector<operation_id> forward, backward;  ///< operations, ascending
    std::vector<value_id> inputs;                 ///< values from earlier blocks that the forward reads, pinned ones excepted
    std::vector<value_id> gradients;              ///< values from later blocks' backward that this or an earlier one reads
  };
  std::vector<block> blocks;        ///< the last one contains the beginning of the backward
  std::vector<value_id> pinned;     ///< values that several blocks read, or that cannot be made again: retained throughout
  operation_id backward_start = 0;  ///< first operation of the backward
};

/// What a method for chains says of a graph that is cut into one block only.
inline constexpr const char* no_chain = "the graph has no chain of blocks";

/// How `find_blocks` cuts.
struct block_options {
  std::optional<operation_id> backward_start =
      {};                     ///< first operation of the backward; by default as the problem says, or what gives the finest chain
  std::size_t interface = 1;  ///< most values between two blocks, >= 1
  std::size_t most = 48;      ///< most blocks, >= 1
  std::size_t least = 8;      ///< fewest operations of a block, unless there is one only; smaller ones are joined
};

namespace detail {

/// The needed operations of a problem, divided into forward and backward: where its blocks may be cut.
class joint_graph {
 public:
  /// A place between two blocks; positions in `needed`.
  struct cut {
    std::size_t forward, backward;   ///< the first position behind it in the forward, and in the backward
    std::vector<value_id> crossing;  ///< values made before it that the forward behind it reads, without
    std::vector<value_id> tiny;      ///< those that do not count beside them
  };

  /// @param p      the problem
  /// @param needed `needed_operations(p)`
  /// @param backward_start   position of the first operation of the backward
  /// @param tiny   values of at most so many bytes do not count between blocks
  joint_graph(const problem& p, const std::vector<operation_id>& needed, std::size_t backward_start, bytes_t tiny)
      : p_(p), needed_(needed), backward_start_(backward_start), tiny_(tiny), lives_(p.values().size()) {
    measure_lives();
    sort_values();
  }

  /// The places where at most `interface` values cross, first to last; their backward positions do not ascend.
  /// Complexity: O(values + edges + positions * values that cross).
  std::vector<cut> cuts(std::size_t interface) const {
    std::vector<std::vector<value_id>> ends(backward_start_ + 1);  // values by the position that reads them last
    for (value_id v = 0; v < lives_.size(); ++v)
      if (counts(v) && lives_[v].last_forward > lives_[v].made) ends[lives_[v].last_forward].push_back(v);
    const auto latest = backward_ends();
    std::vector<cut> cuts;
    const auto is_tiny = [&](value_id v) { return p_.values()[v].bytes <= tiny_; };
    std::vector<value_id> crossing;
    std::size_t earliest = needed_.size();  // first read by the backward of a value that is dead in the forward already
    for (std::size_t q = 1; q < backward_start_; ++q) {
      // Operation q - 1 has run.
      for (auto v : p_.operations()[needed_[q - 1]].outputs) {
        if (!counts(v)) continue;
        if (lives_[v].last_forward >= q)
          crossing.push_back(v);
        else
          earliest = std::min(earliest, lives_[v].first_backward);
      }
      for (auto v : ends[q - 1]) {
        std::erase(crossing, v);
        earliest = std::min(earliest, lives_[v].first_backward);
      }
      const auto tiny = static_cast<std::size_t>(std::count_if(crossing.begin(), crossing.end(), is_tiny));
      if (crossing.size() == tiny || crossing.size() - tiny > interface) continue;
      // What was made before q is not read by the backward of what comes after, the interface excepted.
      if (latest[q] > earliest) continue;
      if (!cuts.empty() && latest[q] > cuts.back().backward) continue;
      cuts.push_back({q, latest[q], {}, {}});
      for (auto v : crossing) (is_tiny(v) ? cuts.back().tiny : cuts.back().crossing).push_back(v);
    }
    return cuts;
  }

  /// Operations between two neighbouring cuts; none stands for the ends of the graph.
  std::size_t size(const cut* from, const cut* to) const {
    return (to ? to->forward : backward_start_) - (from ? from->forward : 0) + (from ? from->backward : needed_.size()) -
           (to ? to->backward : backward_start_);
  }

  /// Removes cuts until there are fewer than `most` and no block is smaller than `least`: the smallest block, the first one of
  /// equals, is joined to its smaller neighbour.
  /// Complexity: O(cuts log cuts).
  void join_small(std::vector<cut>& cuts, std::size_t most, std::size_t least) const {
    const auto n = cuts.size() + 1;  // block i lies before cut i; a joined block goes by its first part
    std::vector<std::size_t> next(n), previous(n), sizes(n);
    std::vector<bool> removed(n, false);  // cuts
    std::set<std::pair<std::size_t, std::size_t>> order;
    for (std::size_t i = 0; i < n; ++i) {
      next[i] = i + 1, previous[i] = i - 1;
      sizes[i] = size(i == 0 ? nullptr : &cuts[i - 1], i + 1 == n ? nullptr : &cuts[i]);
      order.emplace(sizes[i], i);
    }
    while (order.size() > 1 && (order.size() > most || order.begin()->first < least)) {
      const auto smallest = order.begin()->second;
      const bool to_next = smallest == 0 || (next[smallest] < n && sizes[next[smallest]] < sizes[previous[smallest]]);
      const auto one = to_next ? smallest : previous[smallest], other = next[one];
      order.erase({sizes[one], one});
      order.erase({sizes[other], other});
      sizes[one] += sizes[other];
      order.emplace(sizes[one], one);
      next[one] = next[other];
      if (next[one] < n) previous[next[one]] = one;
      removed[other - 1] = true;
    }
    std::size_t i = 0;
    std::erase_if(cuts, [&](const cut&) { return removed[i++]; });
  }

  /// The blocks between cuts.
  /// Complexity: O(values log blocks + what comes out).
  block_chain blocks(const std::vector<cut>& cuts) const {
    block_chain chain;
    chain.backward_start = needed_[backward_start_];
    auto pinned = pinned_;
    const auto at = [&](std::size_t k) { return needed_.begin() + static_cast<std::ptrdiff_t>(k); };
    for (std::size_t i = 0; i <= cuts.size(); ++i) {
      const auto from = i == 0 ? 0 : cuts[i - 1].forward, to = i == cuts.size() ? backward_start_ : cuts[i].forward;
      const auto after = i == 0 ? needed_.size() : cuts[i - 1].backward,
                 before = i == cuts.size() ? backward_start_ : cuts[i].backward;
      block_chain::block b;
      b.forward.assign(at(from), at(to));
      b.backward.assign(at(before), at(after));
      if (i > 0) {
        b.inputs = cuts[i - 1].crossing;
        for (auto v : cuts[i - 1].tiny) pinned[v] = true;
      }
      chain.blocks.push_back(std::move(b));
    }
    for (value_id v = 0; v < lives_.size(); ++v) {
      if (pinned[v]) chain.pinned.push_back(v);
      if (p_.is_source(v) || lives_[v].made < backward_start_ || lives_[v].first_backward == needed_.size()) continue;
      // It arrives at the blocks whose backward begins after it is made and not after its last use.
      const auto first =
          std::partition_point(cuts.begin(), cuts.end(), [&](const cut& c) { return c.backward > lives_[v].last_backward; });
      for (auto c = first; c != cuts.end() && c->backward > lives_[v].made; ++c)
        chain.blocks[static_cast<std::size_t>(c - cuts.begin())].gradients.push_back(v);
    }
    return chain;
  }

 private:
  /// Positions in `needed`; a value that no operation makes is made at 0.
  struct life {
    std::size_t made = 0, last_forward = 0, first_backward = 0, last_backward = 0, forward_reads = 0;
  };

  void measure_lives() {
    for (auto& l : lives_) l.first_backward = needed_.size();
    for (std::size_t k = 0; k < needed_.size(); ++k) {
      const auto& op = p_.operations()[needed_[k]];
      for (auto v : op.outputs) lives_[v].made = k;
      for (auto v : op.inputs) {
        auto& l = lives_[v];
        if (k < backward_start_) {
          l.last_forward = k;
          ++l.forward_reads;
        } else {
          l.first_backward = std::min(l.first_backward, k);
          l.last_backward = k;
        }
      }
    }
  }
  /// Finds the values that blocks need not hand over: held ones and gradients, and those that are pinned.
  void sort_values() {
    pinned_.assign(lives_.size(), false);
    ignored_.assign(lives_.size(), false);
    for (value_id v = 0; v < lives_.size(); ++v) {
      const auto& l = lives_[v];
      const bool source = p_.is_source(v);
      ignored_[v] = p_.values()[v].held || (!source && l.made >= backward_start_);
      if (ignored_[v]) continue;
      const bool read = l.forward_reads > 0 || l.first_backward < needed_.size();
      const bool lossy = source || p_.operations()[p_.producer(v)].once;
      const bool global = l.forward_reads >= 3 && l.last_forward - l.made > backward_start_ / 3;
      pinned_[v] = read && (lossy || global);
    }
  }
  bool counts(value_id v) const { return !ignored_[v] && !pinned_[v]; }
  /// Per position of the forward: the first position of the backward after all reads of values made there or later.
  std::vector<std::size_t> backward_ends() const {
    std::vector<std::size_t> latest(backward_start_ + 1, backward_start_);
    for (value_id v = 0; v < lives_.size(); ++v)
      if (counts(v) && lives_[v].first_backward < needed_.size() && !p_.is_source(v))
        latest[lives_[v].made] = std::max(latest[lives_[v].made], lives_[v].last_backward + 1);
    for (auto q = backward_start_; q-- > 0;) latest[q] = std::max(latest[q], latest[q + 1]);
    return latest;
  }

  const problem& p_;
  const std::vector<operation_id>& needed_;
  std::size_t backward_start_;
  bytes_t tiny_;
  std::vector<life> lives_;
  std::vector<bool> pinned_, ignored_;
};

}  // namespace detail

/// Cuts the needed operations of `p` into a chain of blocks.
///
/// A position q of the forward is a cut if few values made before it are read by the forward after it, and if some position q'
/// of the backward separates what reads values made before q (the interface excepted) from what reads values made after it.
/// Values that many places of the forward read (masks, position tables) and tiny ones do not count: they are pinned.
///
/// @param p the problem
/// @param o options
/// @return the blocks; a single one where there is no chain
/// @throws bad_option if `backward_start` is no operation, or `interface` or `most` is 0
/// Complexity: O(values + edges + positions * values that cross) for each of at most 49 guesses.
inline block_chain find_blocks(const problem& p, const block_options& o = {}) {
  if (o.backward_start && *o.backward_start >= p.operations().size())
    throw bad_option("block_options.backward_start: no operation " + std::to_string(*o.backward_start));
  if (o.interface < 1) throw bad_option("block_options.interface must be >= 1, got 0");
  if (o.most < 1) throw bad_option("block_options.most must be >= 1, got 0");
  const auto needed = needed_operations(p);
  if (needed.empty()) return {};
  const auto needs = measure_order(p, needed);
  const auto last = needed.size() - 1;
  std::vector<std::size_t> starts;
  starts.push_back(backward_start(p, needed, o.backward_start));
  if (!o.backward_start && !p.backward_start()) {
    const auto peak = starts[0];
    for (std::size_t i = 0; i < 48; ++i) starts.push_back(peak / 2 + i * (std::min(last, peak + peak / 8) - peak / 2) / 48);
  }
  for (auto& backward_start : starts) backward_start = std::min(backward_start, last);
  std::sort(starts.begin() + (starts.empty() ? 0 : 1), starts.end());  // the first one wins where others are no better
  starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  std::vector<detail::joint_graph::cut> best;
  std::size_t best_start = 0;
  bytes_t tiny = needs.peak / 1000;
  const auto try_starts = [&] {
    double least = std::numeric_limits<double>::infinity();
    for (const auto backward_start : starts) {
      const detail::joint_graph graph(p, needed, backward_start, tiny);
      auto cuts = graph.cuts(o.interface);
      graph.join_small(cuts, o.most, o.least);
      double squares = 0;
      for (std::size_t i = 0; i <= cuts.size(); ++i)
        squares +=
            std::pow(static_cast<double>(graph.size(i == 0 ? nullptr : &cuts[i - 1], i == cuts.size() ? nullptr : &cuts[i])), 2);
      if (squares < least) least = squares, best = std::move(cuts), best_start = backward_start;
    }
  };
  try_starts();
  if (best.empty()) {  // in a long chain, everything is tiny
    tiny = 0;
    try_starts();
  }
  return detail::joint_graph(p, needed, best_start, tiny).blocks(best);
}

}  // namespace remat::structure
