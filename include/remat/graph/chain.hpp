// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recognises the chain of blocks in the joint forward and backward graph of a network.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// A network cut into blocks: block i is a run of forward operations and the run of backward operations that reads what they
/// made.
struct block_chain {
  struct block {
    std::vector<index_t> forward, backward;  ///< operations, ascending
    std::vector<index_t> inputs;             ///< values from earlier blocks that the forward reads, pinned ones excepted
    std::vector<index_t> gradients;          ///< values from later blocks' backward that this or an earlier one reads
  };
  std::vector<block> blocks;    ///< the last one contains the turn
  std::vector<index_t> pinned;  ///< values that several blocks read, or that cannot be made again: retained throughout
  index_t turn = 0;             ///< first operation of the backward
};

/// How `find_blocks` cuts.
struct block_options {
  std::optional<index_t> turn = {};  ///< first operation of the backward; by default what gives the finest chain
  std::size_t interface = 1;         ///< most values between two blocks, >= 1
  std::size_t most = 48;             ///< most blocks, >= 1
  std::size_t least = 8;             ///< fewest operations of a block, unless there is one only; smaller ones are joined
};

namespace detail {

/// `find_blocks` for one turn, a position in `needed`.
inline block_chain blocks_around(const problem& p, const block_options& o, const std::vector<index_t>& needed, std::size_t turn,
                                 bytes_t tiny) {
  const auto& ops = p.operations();
  const auto& values = p.values();
  const auto n = needed.size();
  block_chain chain;

  // Positions in `needed` from here on; a value made nowhere is made at 0.
  struct life {
    std::size_t made = 0, last_forward = 0, first_backward = 0, last_backward = 0, forward_reads = 0;
  };
  std::vector<life> lives(values.size());
  for (auto& l : lives) l.first_backward = n;
  for (std::size_t k = 0; k < n; ++k) {
    for (auto v : ops[needed[k]].outputs) lives[v].made = k;
    for (auto v : ops[needed[k]].inputs) {
      auto& l = lives[v];
      if (k < turn) {
        l.last_forward = k;
        ++l.forward_reads;
      } else {
        l.first_backward = std::min(l.first_backward, k);
        l.last_backward = k;
      }
    }
  }
  std::vector<bool> pinned(values.size(), false), ignored(values.size(), false);
  for (index_t v = 0; v < values.size(); ++v) {
    const auto& l = lives[v];
    const bool made_forward = p.is_source(v) || l.made < turn;
    ignored[v] = values[v].held || !made_forward;
    if (ignored[v]) continue;
    const bool read = l.forward_reads > 0 || l.first_backward < n;
    const bool lossy = p.is_source(v) || ops[p.producer(v)].once;
    const bool global = l.forward_reads >= 3 && l.last_forward - l.made > turn / 3;
    pinned[v] = read && (lossy || global);
  }

  // Cuts: for each position of the forward, the values that cross it, and the range of matching positions of the backward.
  struct cut {
    std::size_t forward, backward;
    std::vector<index_t> crossing;
  };
  std::vector<std::vector<index_t>> ends(turn + 1);
  for (index_t v = 0; v < values.size(); ++v)
    if (!ignored[v] && !pinned[v] && lives[v].last_forward > lives[v].made) ends[lives[v].last_forward].push_back(v);
  std::vector<std::size_t> latest(turn + 1, turn);  // first position of the backward after all reads of values made at or after q
  for (index_t v = 0; v < values.size(); ++v)
    if (!ignored[v] && !pinned[v] && lives[v].first_backward < n && !p.is_source(v))
      latest[lives[v].made] = std::max(latest[lives[v].made], lives[v].last_backward + 1);
  for (auto q = turn; q-- > 0;) latest[q] = std::max(latest[q], latest[q + 1]);
  std::vector<cut> cuts;
  std::vector<index_t> crossing;
  std::size_t earliest = n;  // first read by the backward of a value that is dead in the forward already
  for (std::size_t q = 1; q < turn; ++q) {
    // Operation q - 1 has run.
    for (auto v : ops[needed[q - 1]].outputs) {
      if (ignored[v] || pinned[v]) continue;
      if (lives[v].last_forward >= q)
        crossing.push_back(v);
      else
        earliest = std::min(earliest, lives[v].first_backward);
    }
    for (auto v : ends[q - 1]) {
      std::erase(crossing, v);
      earliest = std::min(earliest, lives[v].first_backward);
    }
    std::size_t small = 0;
    for (auto v : crossing) small += values[v].bytes <= tiny;
    if (crossing.empty() || crossing.size() - small > o.interface || crossing.size() == small) continue;
    // What was made before q is not read by the backward of what comes after, the interface excepted.
    if (latest[q] > earliest || latest[q] > n) continue;
    cuts.push_back({q, latest[q], crossing});
  }
  // Matching positions must decrease; the smallest blocks are joined to their smaller neighbours.
  std::vector<cut> chosen;
  for (auto& c : cuts)
    if (chosen.empty() || c.backward <= chosen.back().backward) chosen.push_back(std::move(c));
  const auto size = [&](std::size_t i, std::size_t j) {  // operations between the cuts i - 1 and j
    const auto from = i == 0 ? 0 : chosen[i - 1].forward, to = j == chosen.size() ? turn : chosen[j].forward;
    const auto after = i == 0 ? n : chosen[i - 1].backward, before = j == chosen.size() ? turn : chosen[j].backward;
    return to - from + (after - before);
  };
  while (!chosen.empty()) {
    std::size_t smallest = 0;
    for (std::size_t i = 1; i <= chosen.size(); ++i)
      if (size(i, i) < size(smallest, smallest)) smallest = i;
    if (chosen.size() < o.most && size(smallest, smallest) >= o.least) break;
    const bool to_next =
        smallest == 0 || (smallest < chosen.size() && size(smallest + 1, smallest + 1) < size(smallest - 1, smallest - 1));
    chosen.erase(chosen.begin() + static_cast<std::ptrdiff_t>(to_next ? smallest : smallest - 1));
  }

  chain.turn = needed[turn];
  for (std::size_t i = 0; i <= chosen.size(); ++i) {
    block_chain::block b;
    const auto from = i == 0 ? 0 : chosen[i - 1].forward, to = i == chosen.size() ? turn : chosen[i].forward;
    const auto after = i == 0 ? n : chosen[i - 1].backward, before = i == chosen.size() ? turn : chosen[i].backward;
    b.forward.assign(needed.begin() + static_cast<std::ptrdiff_t>(from), needed.begin() + static_cast<std::ptrdiff_t>(to));
    b.backward.assign(needed.begin() + static_cast<std::ptrdiff_t>(before), needed.begin() + static_cast<std::ptrdiff_t>(after));
    if (i > 0)
      for (auto v : chosen[i - 1].crossing) {
        const bool interface = values[v].bytes > tiny;
        if (interface)
          b.inputs.push_back(v);
        else
          pinned[v] = true;
      }
    for (index_t v = 0; v < values.size(); ++v)
      if (!p.is_source(v) && lives[v].made >= turn && lives[v].made < before && lives[v].last_backward >= before &&
          lives[v].first_backward < n)
        b.gradients.push_back(v);
    chain.blocks.push_back(std::move(b));
  }
  for (index_t v = 0; v < values.size(); ++v)
    if (pinned[v]) chain.pinned.push_back(v);
  return chain;
}

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
/// @throws bad_option if `turn` is no operation, or `interface` or `most` is 0
/// Complexity: O(values + edges + cuts * interface).
inline block_chain find_blocks(const problem& p, const block_options& o = {}) {
  if (o.turn && *o.turn >= p.operations().size()) throw bad_option("block_options.turn: no operation " + std::to_string(*o.turn));
  if (o.interface < 1) throw bad_option("block_options.interface must be >= 1, got 0");
  if (o.most < 1) throw bad_option("block_options.most must be >= 1, got 0");
  const auto needed = needed_operations(p);
  if (needed.empty()) return {};
  const auto needs = measure_order(p, needed);
  const auto last = needed.size() - 1;
  std::vector<std::size_t> turns;
  if (o.turn) {
    turns.push_back(static_cast<std::size_t>(std::lower_bound(needed.begin(), needed.end(), *o.turn) - needed.begin()));
  } else {
    const auto peak = static_cast<std::size_t>(std::max_element(needs.memory.begin(), needs.memory.end()) - needs.memory.begin());
    turns.push_back(peak);
    for (std::size_t i = 0; i < 48; ++i) turns.push_back(peak / 2 + i * (std::min(last, peak + peak / 8) - peak / 2) / 48);
  }
  block_chain best;
  double least = std::numeric_limits<double>::infinity();
  for (auto turn : turns) {
    auto chain = detail::blocks_around(p, o, needed, std::min(turn, last), needs.peak / 1000);
    double squares = 0;
    for (const auto& b : chain.blocks) squares += std::pow(static_cast<double>(b.forward.size() + b.backward.size()), 2);
    if (squares < least) least = squares, best = std::move(chain);
  }
  return best;
}

}  // namespace remat
