// SPDX-License-Identifier: Apache-2.0
/// @file
/// Divides any graph into parts: runs of forward operations, each paired with the backward operations that read its values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/range_peak.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/backward_start.hpp>

namespace remat::structure {

/// Operations that are planned together: `backward` comes after all of `forward`. Either may be empty.
struct part {
  std::vector<operation_id> forward, backward;  ///< ascending
  std::size_t size() const { return forward.size() + backward.size(); }
};

/// Disjoint parts of a problem, in the order of their forwards. Operations in no part stand alone.
using partition = std::vector<part>;

/// Message of chain methods for a graph that cannot be cut into blocks.
inline constexpr const char* no_chain = "the graph has no chain of blocks";

/// Options of `find_partition`.
struct partition_options {
  std::optional<operation_id> backward_start =
      {};                 ///< first operation of the backward; by default the one of the problem, or the guess with the best cuts
  std::size_t size = 40;  ///< operations that a part should have, >= 1; a part may differ from it if a cut nearby is thin
  std::size_t most = 64;  ///< largest number of parts, >= 1
  std::size_t interface = 0;  ///< in a chain of blocks: most values that the forward passes from block to block; 0: any parts

  /// @throws bad_option naming the member that is out of range
  void validate(const problem& p) const {
    if (backward_start && *backward_start >= p.operations().size())
      throw bad_option("partition.backward_start: no operation " + std::to_string(*backward_start));
    if (size < 1) throw bad_option("partition.size must be >= 1, got 0");
    if (most < 1) throw bad_option("partition.most must be >= 1, got 0");
  }
};

namespace detail {

/// A cut: positions [forward, backward) are inside, the others are outside.
struct nested_cut {
  std::size_t forward = 0, backward = 0;
  bytes_t crossing = -1;  ///< bytes of values made on one side and read on the other; below 0: no cut here
};

/// The thinnest cut at every position before `backward_start`. For each q it finds the q' >= `backward_start` with the fewest
/// bytes that cross between [q, q') and the outside. Targets do not count where they are made, because they stay to the end
/// anyway.
/// Complexity: O(edges log operations).
inline std::vector<nested_cut> nested_cuts(const problem& p, const std::vector<operation_id>& needed,
                                           std::size_t backward_start) {
  const auto n = needed.size();
  const auto& values = p.values();
  std::vector<std::size_t> next(values.size(), n), last(values.size(), 0);  // positions of reads at or after q; n: none
  range_peak spared(std::vector<bytes_t>(n + 1 - backward_start, 0));       // minus the crossing bytes, at q' - backward_start
  const auto raise = [&](std::size_t from, std::size_t to, bytes_t by) {    // for q' in [from, to)
    spared.add(std::max(from, backward_start) - backward_start, std::max(to, backward_start) - backward_start, -by);
  };
  for (auto k = n; k-- > 0;)
    for (auto v : p.operations()[needed[k]].inputs)
      if (last[v] == 0) last[v] = k;
  std::vector<nested_cut> cuts(backward_start + 1);
  for (auto q = n; q-- > 0;) {
    const auto& op = p.operations()[needed[q]];
    for (auto v : op.outputs) {
      if (next[v] < n) raise(next[v] + 1, n + 1, -values[v].bytes);                    // no longer comes in from outside
      if (last[v] > q && !p.is_target(v)) raise(q + 1, last[v] + 1, values[v].bytes);  // goes out of the cut
    }
    for (auto v : op.inputs) {
      if (!values[v].held) raise(q + 1, next[v] < n ? next[v] + 1 : n + 1, values[v].bytes);  // comes in from outside
      next[v] = q;
    }
    if (q > backward_start) continue;
    const auto best = spared.position_of_max();
    cuts[q] = {q, best + backward_start, -spared.at(best)};
  }
  return cuts;
}

/// The possible cuts of a chain of blocks. A position q of the forward is a cut if the forward after q reads between 1 and
/// `interface` values made before q. Its partner is the position of the backward that separates the readers of values made
/// before q (other than the crossing values) from the readers of values made after q. Without such a position there is no cut at
/// q.
///
/// Some values do not count: values that many places of the forward read (masks, position tables), and values that cannot be
/// recomputed. Values of at most `tiny` bytes do not count among the crossing values.
/// Complexity: O(values + edges).
inline std::vector<nested_cut> chain_cuts(const problem& p, const std::vector<operation_id>& needed, std::size_t backward_start,
                                          std::size_t interface, bytes_t tiny) {
  const auto n = needed.size();
  struct life {  // positions in `needed`
    std::size_t made, last_forward, first_backward, last_backward, forward_reads;
  };
  std::vector<life> lives(p.values().size(), {n, 0, n, 0, 0});
  for (std::size_t k = 0; k < n; ++k) {
    const auto& op = p.operations()[needed[k]];
    if (!op.once)
      for (auto v : op.outputs) lives[v].made = k;
    for (auto v : op.inputs) {
      auto& l = lives[v];
      if (k < backward_start) {
        l.last_forward = k;
        ++l.forward_reads;
      } else {
        l.first_backward = std::min(l.first_backward, k);
        l.last_backward = k;
      }
    }
  }
  const auto counts = [&](value_id v) {
    const auto& l = lives[v];
    const bool everywhere = l.forward_reads >= 3 && l.last_forward - l.made > backward_start / 3;
    return l.made < backward_start && !everywhere;
  };
  std::vector<std::vector<value_id>> ends(backward_start + 1);  // values by the position of their last read in the forward
  std::vector<std::size_t> latest(backward_start + 1, backward_start);  // after all reads of values made there or later
  for (value_id v = 0; v < lives.size(); ++v) {
    if (!counts(v)) continue;
    const auto& l = lives[v];
    ends[std::max(l.made, l.last_forward)].push_back(v);
    if (l.first_backward < n) latest[l.made] = std::max(latest[l.made], l.last_backward + 1);
  }
  for (auto q = backward_start; q-- > 0;) latest[q] = std::max(latest[q], latest[q + 1]);
  std::vector<nested_cut> cuts(backward_start + 1);
  std::size_t crossing = 0, earliest = n;  // earliest: first read by the backward of a value that is dead in the forward
  bytes_t bytes = 0;
  const auto add = [&](value_id v, bool enters) {
    const auto size = p.values()[v].bytes;
    bytes += enters ? size : -size;
    if (size > tiny) crossing += enters ? 1 : std::size_t(-1);
  };
  for (std::size_t q = 1; q < backward_start; ++q) {  // operation q - 1 has run
    for (auto v : p.operations()[needed[q - 1]].outputs)
      if (counts(v)) add(v, true);
    for (auto v : ends[q - 1]) {
      add(v, false);
      earliest = std::min(earliest, lives[v].first_backward);
    }
    if (crossing > 0 && crossing <= interface && latest[q] <= earliest) cuts[q] = {q, latest[q], bytes};
  }
  return cuts;
}

/// Chooses cuts with few crossing bytes and about `size` operations between them, by dynamic programming.
/// @param all      the best cut at each position of the forward
/// @param n        number of positions
/// @param size     operations that a part should have
/// @param thinnest true: only cuts that are no wider than their neighbours
/// @param cost     receives the minimum of the objective
/// Complexity: O(cuts size).
inline std::vector<nested_cut> choose_cuts(const std::vector<nested_cut>& all, std::size_t n, double size, bool thinnest,
                                           double& cost) {
  const auto backward_start = all.size() - 1;
  const auto window = static_cast<std::size_t>(2 * size) + 2;  // a cut is compared with the mean of the cuts around it
  std::vector<double> sum(backward_start + 2, 0), count(backward_start + 2, 0);
  for (std::size_t q = 0; q <= backward_start; ++q) {
    const bool cut = all[q].crossing >= 0;
    sum[q + 1] = sum[q] + (cut ? static_cast<double>(all[q].crossing) : 0);
    count[q + 1] = count[q] + (cut ? 1 : 0);
  }
  struct state {
    nested_cut cut;
    double price, best;
    std::size_t previous;
  };
  std::vector<state> states = {{{0, n, 0}, 0, 0, 0}};
  for (std::size_t q = 1; q < backward_start; ++q) {
    if (all[q].crossing < 0) continue;
    if (thinnest && all[q].crossing > std::min(all[q - 1].crossing, all[q + 1].crossing)) continue;
    const auto from = q > window ? q - window : 0, to = std::min(backward_start + 1, q + window + 1);
    const double bytes = sum[to] - sum[from], cuts = count[to] - count[from];
    states.push_back({all[q], 0.1 + (bytes > 0 ? 2 * static_cast<double>(all[q].crossing) * cuts / bytes : 0), 0, 0});
  }
  constexpr std::size_t min_look_back = 96;  // candidates to look back at; more only if they do not nest or are close together
  const auto comparisons =
      static_cast<double>(states.size()) * std::min(static_cast<double>(states.size()), 4 * size + min_look_back);
  if (const auto group = static_cast<std::size_t>(comparisons / 5e7) + 1; group > 1) {  // huge graphs: the cheapest of each group
    std::vector<state> cheapest = {states[0]};
    for (std::size_t from = 1; from < states.size(); from += group)
      cheapest.push_back(*std::min_element(states.begin() + static_cast<std::ptrdiff_t>(from),
                                           states.begin() + static_cast<std::ptrdiff_t>(std::min(from + group, states.size())),
                                           [](const auto& a, const auto& b) { return a.price < b.price; }));
    states = std::move(cheapest);
  }
  states.push_back({{backward_start, backward_start, 0}, 0, 0, 0});
  for (std::size_t j = 1; j < states.size(); ++j) {
    auto& s = states[j];
    s.best = std::numeric_limits<double>::infinity();
    for (auto i = j; i-- > 0;) {
      const auto& outer = states[i];
      if (outer.cut.backward < s.cut.backward) continue;
      const auto operations = static_cast<double>(s.cut.forward - outer.cut.forward + (outer.cut.backward - s.cut.backward));
      const double total = outer.best + s.price + operations * operations / (size * size);
      if (total < s.best) s.best = total, s.previous = i;
      if (j - i > min_look_back && operations > 4 * size) break;
    }
  }
  cost = states.back().best;
  std::vector<nested_cut> chosen;
  for (auto j = states.back().previous; j > 0; j = states[j].previous) chosen.push_back(states[j].cut);
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

/// A run without the once-only operations that can run before or after all other operations of the run.
inline std::vector<operation_id> without_once_at_ends(const problem& p, std::vector<operation_id> run) {
  const auto in_run = [&](operation_id o) { return o != none && std::binary_search(run.begin(), run.end(), o); };
  const auto read_here = [&](value_id v) {
    const auto readers = p.consumers(v);
    return std::any_of(readers.begin(), readers.end(), in_run);
  };
  for (auto k = run.size(); k-- > 0;) {
    const auto& op = p.operations()[run[k]];
    if (op.once && std::none_of(op.outputs.begin(), op.outputs.end(), read_here))
      run.erase(run.begin() + static_cast<std::ptrdiff_t>(k));
  }
  for (std::size_t k = 0; k < run.size();) {
    const auto& op = p.operations()[run[k]];
    const bool alone =
        op.once && std::none_of(op.inputs.begin(), op.inputs.end(), [&](value_id v) { return in_run(p.producer(v)); });
    if (alone)
      run.erase(run.begin() + static_cast<std::ptrdiff_t>(k));
    else
      ++k;
  }
  return run;
}

/// The search behind `find_partition`: tries starts of the backward, and keeps the cuts of the best one.
class partition_search {
 public:
  /// @param p      the problem; must outlive the search, like the other arguments
  /// @param needed `needed_operations(p)`, at least two
  /// @param o      valid options
  /// @param stop   polled between starts
  partition_search(const problem& p, const std::vector<operation_id>& needed, const partition_options& o,
                   const std::function<bool()>& stop)
      : p_(p),
        needed_(needed),
        options_(o),
        stop_(stop),
        thinnest_(o.interface == 0 && o.size >= 20),
        memory_(measure_order(p, needed)),
        tiny_(memory_.peak / 1000) {}

  void run() {
    try_starts();
    if (options_.interface > 0 && chosen_.empty()) {  // in a long chain, every value is tiny
      tiny_ = 0;
      try_starts();
    }
    limit_parts();
  }

  /// The parts between the chosen cuts.
  partition parts() const {
    partition parts;
    const auto n = needed_.size(), backward_start = candidates_.size() - 1;
    const auto run = [&](std::size_t from, std::size_t to) {
      return without_once_at_ends(
          p_, {needed_.begin() + static_cast<std::ptrdiff_t>(from), needed_.begin() + static_cast<std::ptrdiff_t>(to)});
    };
    for (std::size_t i = 0; i <= chosen_.size(); ++i) {
      const bool first = i == 0, last = i == chosen_.size();
      part x{run(first ? 0 : chosen_[i - 1].forward, last ? backward_start : chosen_[i].forward),
             run(last ? backward_start : chosen_[i].backward, first ? n : chosen_[i - 1].backward)};
      if (x.size() > (options_.interface > 0 ? 0u : 1u)) parts.push_back(std::move(x));
    }
    return parts;
  }

 private:
  /// Tries the start that is known. If there is none, it tries guesses.
  void try_starts() {
    if (options_.backward_start || p_.backward_start()) return try_start(backward_start(p_, needed_, options_.backward_start));
    try_near_peak();
    try_innermost_part();
    try_largest_memory();
  }

  /// The forward ends near the peak.
  void try_near_peak() {
    const auto peak = backward_start(p_, needed_);
    for (const double f : {1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1})
      try_start(std::min(needed_.size() - 1, static_cast<std::size_t>(f * static_cast<double>(peak))));
  }

  /// A wrong guess spoils only the innermost part, so the search continues there.
  void try_innermost_part() {
    for (int round = 0; round < 6; ++round) {
      const double before = min_cost_;
      const auto [from, to] = innermost_part();
      constexpr std::size_t tries = 12;
      for (std::size_t k = 0; k < tries; ++k) try_start(from + (to - from) * k / tries);
      if (!(min_cost_ < before)) break;
    }
  }

  /// Within the innermost part the start matters little to the cuts. Prefers the position with the largest memory.
  void try_largest_memory() {
    const auto [from, to] = innermost_part();
    if (options_.interface == 0) min_cost_ *= 1.1;
    if (from < to) {
      const auto first = memory_.memory.begin() + static_cast<std::ptrdiff_t>(from);
      const auto largest = std::max_element(first, memory_.memory.begin() + static_cast<std::ptrdiff_t>(to));
      try_start(static_cast<std::size_t>(largest - memory_.memory.begin()));
    }
  }

  /// Chooses cuts for a start of the backward. Keeps them if they are the best so far.
  void try_start(std::size_t backward_start) {
    if (!candidates_.empty() && stop_ && stop_()) return;
    auto candidates = options_.interface > 0 ? chain_cuts(p_, needed_, backward_start, options_.interface, tiny_)
                                             : nested_cuts(p_, needed_, backward_start);
    double cost = 0;
    auto chosen = choose_cuts(candidates, needed_.size(), static_cast<double>(options_.size), thinnest_, cost);
    if (cost < min_cost_) min_cost_ = cost, candidates_ = std::move(candidates), chosen_ = std::move(chosen);
  }

  /// The positions [first, second) inside the last cut.
  std::pair<std::size_t, std::size_t> innermost_part() const {
    if (chosen_.empty()) return {0, needed_.size()};
    return {chosen_.back().forward, chosen_.back().backward};
  }

  /// Chooses fewer cuts if there are too many parts.
  void limit_parts() {
    const auto n = needed_.size();
    auto size = 2 * options_.size;
    while (chosen_.size() >= options_.most && n / size / 8 > options_.most) size *= 2;  // even these sizes leave too many parts
    for (; chosen_.size() >= options_.most; size *= 2)
      chosen_ = choose_cuts(candidates_, n, static_cast<double>(size), thinnest_, min_cost_);
  }

  const problem& p_;
  const std::vector<operation_id>& needed_;
  const partition_options& options_;
  const std::function<bool()>& stop_;
  bool thinnest_;  // false: small parts may have to be cut anywhere
  order_cost memory_;
  bytes_t tiny_;
  std::vector<nested_cut> candidates_, chosen_;  // at every position of the forward; those that divide the parts
  double min_cost_ = std::numeric_limits<double>::infinity();
};

}  // namespace detail

/// Cuts the needed operations of `p`, in their order, into nested parts at places where few bytes cross.
///
/// A cut is a position of the forward with a partner in the backward. The operations between the two are inside. Values made on
/// one side and read on the other cross the cut. A dynamic program weighs the crossing bytes, relative to the mean of the cuts
/// around, against the sizes of the parts.
///
/// On a chain, the cuts are its cut points, which one activation and its gradient cross. A skip connection adds its bytes to
/// every cut that it spans. So encoder and decoder levels, dense blocks and branches come apart where they are thinnest. If no
/// place is thin, the parts have balanced sizes. Equal layers are cut alike.
///
/// A once-only operation stands alone unless it is needed in the middle of a part. So the rest of the part can be recomputed.
///
/// With `interface`, the parts are the blocks of a chain. At a cut, few values cross in the forward. The backward of a block
/// reads no other values from the forward outside.
///
/// @param p    the problem
/// @param o    options
/// @param stop polled between guesses of the start of the backward; true ends the search after at least one guess
/// @return the parts; none if there is no place to cut
/// @throws bad_option if `backward_start` is no operation, or `size` or `most` is 0
/// Complexity: O(edges log operations).
inline partition find_partition(const problem& p, const partition_options& o = {}, const std::function<bool()>& stop = {}) {
  o.validate(p);
  const auto needed = needed_operations(p);
  if (needed.size() < 2) return {};
  detail::partition_search search(p, needed, o, stop);
  search.run();
  return search.parts();
}

/// The parts without their once-only operations, which then stand alone. All remaining operations can be recomputed.
/// Complexity: O(operations).
inline partition without_once(const problem& p, partition parts) {
  const auto once = [&](operation_id o) { return p.operations()[o].once; };
  for (auto& x : parts) {
    std::erase_if(x.forward, once);
    std::erase_if(x.backward, once);
  }
  std::erase_if(parts, [](const part& x) { return x.size() == 0; });
  return parts;
}

}  // namespace remat::structure
