// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recomputations made unnecessary by retention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>

namespace remat::order {

namespace detail {

/// Does a valid order without those `removed`, and without what nobody reads then, need no more than `budget` bytes while it
/// computes? Gives up at the first that does. `wanted` is a buffer. Complexity: O(values + edges executed).
inline bool fits_without(const problem& p, std::span<const operation_id> order, const std::vector<bool>& removed, bytes_t budget,
                         std::vector<unsigned char>& wanted) {
  const auto& values = p.values();
  wanted.assign(values.size(), 0);
  bytes_t live = p.held_bytes();
  for (value_id v = 0; v < values.size(); ++v) wanted[v] = values[v].held;
  const auto want = [&](value_id v) {
    if (!wanted[v]) live += values[v].bytes;
    wanted[v] = 1;
  };
  for (auto v : p.targets()) want(v);
  for (std::size_t k = order.size(); k-- > 0;) {
    const auto& op = p.operations()[order[k]];
    if (removed[k] || std::none_of(op.outputs.begin(), op.outputs.end(), [&](value_id v) { return wanted[v] != 0; })) continue;
    bytes_t written = op.workspace;
    for (auto v : op.outputs) {
      written += values[v].bytes;
      if (wanted[v]) live -= values[v].bytes;
      wanted[v] = 0;
    }
    for (auto v : op.inputs) want(v);
    if (live + written > budget) return false;
  }
  return true;
}

}  // namespace detail

/// Removes recomputations whose results can be retained within the budget, most seconds per byte retained first, until none is
/// left.
/// @param p      the problem
/// @param order  a valid order, in any case within the budget
/// @param budget bytes
/// @param stop   polled now and then; true ends the search with what there is
/// @return an order that is no slower
/// Complexity: O(recomputations * distance to the computation before) per round, and 100 000 steps or 20 passes over the order;
/// few rounds.
inline std::vector<operation_id> retain_more(const problem& p, std::vector<operation_id> order, bytes_t budget,
                                             const std::function<bool()>& stop = {}) {
  struct candidate {
    std::size_t at, before;
    bytes_t bytes;
    double worth;
  };
  bool changed = true;
  while (changed && !(stop && stop())) {
    changed = false;
    std::vector<candidate> candidates;
    {
      std::vector<std::size_t> last(p.operations().size(), order.size());
      std::vector<bool> wanted(p.values().size(), false);
      for (auto v : p.targets()) wanted[v] = true;
      std::vector<bytes_t> needed(order.size(), 0);
      for (std::size_t k = order.size(); k-- > 0;) {
        const auto& op = p.operations()[order[k]];
        for (auto v : op.outputs) {
          if (wanted[v]) needed[k] += p.values()[v].bytes;
          wanted[v] = false;
        }
        for (auto v : op.inputs) wanted[v] = true;
      }
      for (std::size_t k = 0; k < order.size(); ++k) {
        auto& before = last[order[k]];
        if (before != order.size())
          candidates.push_back(
              {k, before, needed[k],
               p.operations()[order[k]].seconds / (static_cast<double>(needed[k]) * static_cast<double>(k - before) + 1)});
        before = k;
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.worth > b.worth; });
    std::vector<bool> removed(order.size(), false), touched(p.operations().size(), false);
    auto memory = measure_order(p, order).memory;
    std::vector<unsigned char> wanted;
    auto looks = std::max<std::ptrdiff_t>(20, 100'000 / static_cast<std::ptrdiff_t>(order.size() + 1));  // few of them succeed
    for (const auto& c : candidates) {
      if (stop && stop()) break;
      if (touched[order[c.at]]) continue;  // its previous computation may have gone: next round
      const auto highest = c.at == c.before + 1 ? 0
                                                : *std::max_element(memory.begin() + static_cast<std::ptrdiff_t>(c.before) + 1,
                                                                    memory.begin() + static_cast<std::ptrdiff_t>(c.at));
      removed[c.at] = true;
      bool fits = highest + c.bytes <= budget;
      if (!fits && highest <= budget + c.bytes && looks-- > 0) fits = detail::fits_without(p, order, removed, budget, wanted);
      if (!fits) {
        removed[c.at] = false;
        continue;
      }
      for (auto k = c.before + 1; k < c.at; ++k) memory[k] += c.bytes;
      touched[order[c.at]] = changed = true;
    }
    std::vector<operation_id> rest;
    for (std::size_t k = 0; k < order.size(); ++k)
      if (!removed[k]) rest.push_back(order[k]);
    order = prune_order(p, rest);
  }
  return order;
}

}  // namespace remat::order
