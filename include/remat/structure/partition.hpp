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
  const auto around = static_cast<std::size_t>(2 * size) + 2;  // a cut is compared with the mean of the cuts around it
  std::vector<double> sum(backward_start + 2, 0), count(backward_start + 2, 0);
  for (std::size_t q = 0; q <= backward_start; ++q) {
    const bool cut = all[q].crossing >= 0;
    sum[q + 1] = sum[q] + (cut ? static_cast<double>(all[q].crossing) : 0);
    count[q + 1] = count[q] + (cut ? 1 : 0);
  }
  struct state {
    nested_cut cut;
    double price, best;
    std::size_t before;
  };
  std::vector<state> states = {{{0, n, 0}, 0, 0, 0}};
  for (std::size_t q = 1; q < backward_start; ++q) {
    if (all[q].crossing < 0) continue;
    if (thinnest && all[q].crossing > std::min(all[q - 1].crossing, all[q + 1].crossing)) continue;
    const auto from = q > around ? q - around : 0, to = std::min(backward_start + 1, q + around + 1);
    const double bytes = sum[to] - sum[from], cuts = count[to] - count[from];
    states.push_back({all[q], 0.1 + (bytes > 0 ? 2 * static_cast<double>(all[q].crossing) * cuts / bytes : 0), 0, 0});
  }
  constexpr std::size_t reach = 96;  // candidates to look back at; more only if they do not nest or are close together
  const auto looks = static_cast<double>(states.size()) * std::min(static_cast<double>(states.size()), 4 * size + reach);
  if (const auto group = static_cast<std::size_t>(looks / 5e7) + 1; group > 1) {  // huge graphs: the cheapest of each group
    std::vector<state> fewer = {states[0]};
    for (std::size_t from = 1; from < states.size(); from += group)
      fewer.push_back(*std::min_element(states.begin() + static_cast<std::ptrdiff_t>(from),
                                        states.begin() + static_cast<std::ptrdiff_t>(std::min(from + group, states.size())),
                                        [](const auto& a, const auto& b) { return a.price < b.price; }));
    states = std::move(fewer);
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
      if (total < s.best) s.best = total, s.before = i;
      if (j - i > reach && operations > 4 * size) break;
    }
  }
  cost = states.back().best;
  std::vector<nested_cut> chosen;
  for (auto j = states.back().before; j > 0; j = states[j].before) chosen.push_back(states[j].cut);
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
  const auto n = needed.size();
  if (n < 2) return {};
  const bool thinnest = o.interface == 0 && o.size >= 20;  // small parts may have to be cut anywhere
  std::vector<detail::nested_cut> all, chosen;
  double least = std::numeric_limits<double>::infinity();
  const auto needs = measure_order(p, needed);
  auto tiny = needs.peak / 1000;
  const auto attempt = [&](std::size_t backward_start) {
    if (!all.empty() && stop && stop()) return;
    auto cuts = o.interface > 0 ? detail::chain_cuts(p, needed, backward_start, o.interface, tiny)
                                : detail::nested_cuts(p, needed, backward_start);
    double cost = 0;
    auto some = detail::choose_cuts(cuts, n, static_cast<double>(o.size), thinnest, cost);
    if (cost < least) least = cost, all = std::move(cuts), chosen = std::move(some);
  };
  const auto guess = [&] {
    if (o.backward_start || p.backward_start()) return attempt(backward_start(p, needed, o.backward_start));
    // The forward ends near the peak. A wrong guess spoils only the innermost part, so the search continues there.
    const auto peak = backward_start(p, needed);
    for (const double f : {1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1})
      attempt(std::min(n - 1, static_cast<std::size_t>(f * static_cast<double>(peak))));
    const auto innermost = [&] {
      return chosen.empty() ? std::pair{std::size_t{0}, n} : std::pair{chosen.back().forward, chosen.back().backward};
    };
    for (int round = 0; round < 6; ++round) {
      const double before = least;
      const auto [from, to] = innermost();
      constexpr std::size_t tries = 12;
      for (std::size_t k = 0; k < tries; ++k) attempt(from + (to - from) * k / tries);
      if (!(least < before)) break;
    }
    // Within the innermost part the start matters little to the cuts. Prefer the position with the largest memory.
    const auto [from, to] = innermost();
    if (o.interface == 0) least *= 1.1;
    if (from < to) {
      const auto first = needs.memory.begin() + static_cast<std::ptrdiff_t>(from);
      const auto largest = std::max_element(first, needs.memory.begin() + static_cast<std::ptrdiff_t>(to));
      attempt(static_cast<std::size_t>(largest - needs.memory.begin()));
    }
  };
  guess();
  if (o.interface > 0 && chosen.empty()) {  // in a long chain, every value is tiny
    tiny = 0;
    guess();
  }
  auto size = 2 * o.size;
  while (chosen.size() >= o.most && n / size / 8 > o.most) size *= 2;  // even these sizes leave too many parts
  for (; chosen.size() >= o.most; size *= 2) chosen = detail::choose_cuts(all, n, static_cast<double>(size), thinnest, least);

  partition parts;
  const auto backward_start = all.size() - 1;
  for (std::size_t i = 0; i <= chosen.size(); ++i) {
    const auto run = [&](std::size_t from, std::size_t to) {
      return detail::without_once_at_ends(
          p, {needed.begin() + static_cast<std::ptrdiff_t>(from), needed.begin() + static_cast<std::ptrdiff_t>(to)});
    };
    const bool first = i == 0, last = i == chosen.size();
    part piece{run(first ? 0 : chosen[i - 1].forward, last ? backward_start : chosen[i].forward),
               run(last ? backward_start : chosen[i].backward, first ? n : chosen[i - 1].backward)};
    if (piece.size() > (o.interface > 0 ? 0u : 1u)) parts.push_back(std::move(piece));
  }
  return parts;
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
