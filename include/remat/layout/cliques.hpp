// SPDX-License-Identifier: Apache-2.0
/// @file
/// Live ranges as an interval graph: the maximal sets of allocations that are live together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <remat/layout/allocation.hpp>

namespace remat::detail {

/// Input of the layout search. Offsets and sizes are in units: the greatest common divisor of all sizes.
struct packing_problem {
  struct item {
    bytes_t size = 0;             ///< units
    index_t first = 0, last = 0;  ///< first and last clique that contain the item
    double duration = 0;
  };
  bytes_t unit = 1;                              ///< bytes
  std::vector<item> items;                       ///< the allocations of more than 0 bytes
  std::vector<index_t> allocation_of;            ///< per item: position of its allocation
  std::vector<std::vector<index_t>> cliques;     ///< maximal cliques in the order of time, each with its items
  std::vector<std::vector<index_t>> neighbours;  ///< per item: the items that are live at the same time as it is
};

/// Makes the input of the layout search.
/// @param list      n allocations with birth < death
/// @param max_pairs limit on the pairs of neighbours, which bounds the memory of the search
/// @return the input; nothing if there are more pairs
/// Complexity: O(n log n + sizes of all cliques + pairs). There are at most n cliques.
inline std::optional<packing_problem> packing_problem_of(std::span<const allocation> list, std::size_t max_pairs) {
  packing_problem p;
  bytes_t unit = 0;
  for (index_t i = 0; i < list.size(); ++i) {
    if (list[i].bytes == 0) continue;
    p.allocation_of.push_back(i);
    unit = std::gcd(unit, list[i].bytes);
  }
  if (p.allocation_of.empty()) return p;
  p.unit = unit;
  p.items.resize(p.allocation_of.size());

  // Sweep over time. A clique is maximal where a death follows a birth.
  std::vector<std::pair<std::int64_t, index_t>> births, deaths;
  for (index_t k = 0; k < p.allocation_of.size(); ++k) {
    const auto& a = list[p.allocation_of[k]];
    p.items[k].size = a.bytes / unit;
    p.items[k].duration = static_cast<double>(a.death - a.birth);
    births.emplace_back(a.birth, k);
    deaths.emplace_back(a.death, k);
  }
  std::sort(births.begin(), births.end());
  std::sort(deaths.begin(), deaths.end());
  index_t cliques = 0;
  std::size_t alive = 0, pairs = 0;
  for (std::size_t b = 0, d = 0; d < deaths.size();) {
    bool born = false;
    for (; b < births.size() && births[b].first < deaths[d].first; ++b) {
      p.items[births[b].second].first = cliques;
      pairs += alive++;
      born = true;
    }
    if (pairs > max_pairs) return std::nullopt;
    if (born) ++cliques;
    const auto death = deaths[d].first;
    for (; d < deaths.size() && deaths[d].first == death; ++d, --alive) p.items[deaths[d].second].last = cliques - 1;
  }

  p.cliques.resize(cliques);
  p.neighbours.resize(p.items.size());
  for (index_t k = 0; k < p.items.size(); ++k) {
    const auto& x = p.items[k];
    for (auto c = x.first; c <= x.last; ++c) p.cliques[c].push_back(k);
  }
  for (index_t c = 0; c < cliques; ++c)
    for (auto k : p.cliques[c]) {
      if (p.items[k].first != c) continue;  // an item born with this clique meets all others here for the first time
      for (auto other : p.cliques[c]) {
        if (other == k) continue;
        p.neighbours[k].push_back(other);
        if (p.items[other].first < c) p.neighbours[other].push_back(k);
      }
    }
  return p;
}

}  // namespace remat::detail
