// SPDX-License-Identifier: Apache-2.0
/// @file
/// Cuts between parts of a graph: a position of the forward, with a partner in the backward. Private to `find_partition`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/range_peak.hpp>

namespace remat::structure::detail {

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

}  // namespace remat::structure::detail
