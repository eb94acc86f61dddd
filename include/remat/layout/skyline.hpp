// SPDX-License-Identifier: Apache-2.0
/// @file
/// A first layout in O(n log n). The lowest step of the skyline takes the longest allocation that lies within it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <remat/layout/allocation.hpp>

namespace remat::detail {

/// The unplaced allocations, searchable for the longest within a span of time. This is a segment tree over births: a node knows
/// the earliest death and the longest duration below it.
class longest_within {
 public:
  explicit longest_within(std::span<const allocation> list) : list_(list), by_birth_(list.size()) {
    std::iota(by_birth_.begin(), by_birth_.end(), index_t{0});
    std::stable_sort(by_birth_.begin(), by_birth_.end(), [&](index_t a, index_t b) { return list[a].birth < list[b].birth; });
    position_.resize(list.size());
    while (leaves_ < list.size()) leaves_ *= 2;
    nodes_.resize(2 * leaves_);
    for (std::size_t k = 0; k < list.size(); ++k) {
      position_[by_birth_[k]] = k;
      const auto& a = list[by_birth_[k]];
      nodes_[leaves_ + k] = {a.death, {a.death - a.birth, a.bytes}};
    }
    for (auto k = leaves_ - 1; k > 0; --k) update_node(k);
  }

  /// The longest allocation with `from` <= birth and death <= `to`; the largest if there are several, `none` if there is none.
  index_t find(std::int64_t from, std::int64_t to) const {
    const auto at = [&](std::int64_t when) {
      const auto earlier = [&](index_t i, std::int64_t t) { return list_[i].birth < t; };
      const auto found = std::lower_bound(by_birth_.begin(), by_birth_.end(), when, earlier);
      return static_cast<std::size_t>(found - by_birth_.begin());
    };
    query q{at(from), at(to), to};
    if (q.first < q.last) search_node(1, 0, leaves_, q);
    return q.best;
  }

  void remove(index_t i) {
    auto k = leaves_ + position_[i];
    nodes_[k] = {};
    while (k /= 2) update_node(k);
  }

 private:
  struct node {
    std::int64_t death = std::numeric_limits<std::int64_t>::max();  ///< earliest death
    std::pair<std::int64_t, bytes_t> longest{-1, -1};               ///< longest duration, and its bytes
  };
  struct query {
    std::size_t first, last;  ///< range of positions by birth
    std::int64_t to;
    index_t best = none;
    std::pair<std::int64_t, bytes_t> longest{-1, -1};
  };

  void update_node(std::size_t k) {
    nodes_[k] = {std::min(nodes_[2 * k].death, nodes_[2 * k + 1].death),
                 std::max(nodes_[2 * k].longest, nodes_[2 * k + 1].longest)};
  }

  void search_node(std::size_t k, std::size_t first, std::size_t last, query& q) const {
    if (last <= q.first || q.last <= first || nodes_[k].death > q.to || nodes_[k].longest <= q.longest) return;
    if (q.to - list_[by_birth_[std::max(first, q.first)]].birth < q.longest.first) return;
    if (k < leaves_) {
      const auto middle = first + (last - first) / 2;
      search_node(2 * k, first, middle, q);
      search_node(2 * k + 1, middle, last, q);
      return;
    }
    q.best = by_birth_[first];
    q.longest = nodes_[k].longest;
  }

  std::span<const allocation> list_;
  std::vector<index_t> by_birth_;
  std::vector<std::size_t> position_;  ///< inverse of `by_birth_`
  std::size_t leaves_ = 1;
  std::vector<node> nodes_;
};

/// Places allocations from the bottom. Each time, the lowest step of the skyline over time takes the longest allocation that
/// lies within the step. If there is none, the step is raised to its lower neighbour.
///
/// Reference: the best-fit heuristic of T. Sekiyama, T. Imai, H. Imamichi, R. Raymond, "Profile-guided memory optimization for
/// deep neural networks", 2018.
/// @param list n allocations with birth < death
/// @return an offset for each allocation, bytes
/// Complexity: O(n log n) for nested live ranges; a search of the tree may take longer if live ranges cross.
inline std::vector<bytes_t> skyline_layout(std::span<const allocation> list) {
  std::vector<bytes_t> offsets(list.size(), 0);
  if (list.empty()) return offsets;
  longest_within unplaced(list);
  auto begin = list[0].birth, end = list[0].death;
  for (const auto& a : list) {
    begin = std::min(begin, a.birth);
    end = std::max(end, a.death);
  }
  struct step {
    std::int64_t to;
    bytes_t height;
  };
  std::map<std::int64_t, step> skyline;                  // by beginning
  std::set<std::pair<bytes_t, std::int64_t>> by_height;  // height, beginning
  const auto add = [&](std::int64_t from, std::int64_t to, bytes_t height) {
    if (from >= to) return;
    auto after = skyline.lower_bound(from);
    if (after != skyline.end() && after->first == to && after->second.height == height) {  // merge equal neighbours
      to = after->second.to;
      by_height.erase({height, after->first});
      after = skyline.erase(after);
    }
    if (after != skyline.begin() && std::prev(after)->second.height == height) {
      std::prev(after)->second.to = to;
      return;
    }
    skyline.emplace_hint(after, from, step{to, height});
    by_height.emplace(height, from);
  };
  add(begin, end, 0);
  for (auto unplaced_count = list.size(); unplaced_count > 0;) {
    const auto [height, from] = *by_height.begin();
    const auto lowest_step = skyline.find(from);
    const auto to = lowest_step->second.to;
    const auto i = unplaced.find(from, to);
    auto raised = std::numeric_limits<bytes_t>::max();
    if (lowest_step != skyline.begin()) raised = std::prev(lowest_step)->second.height;
    if (std::next(lowest_step) != skyline.end()) raised = std::min(raised, std::next(lowest_step)->second.height);
    by_height.erase(by_height.begin());
    skyline.erase(lowest_step);
    if (i == none) {
      add(from, to, raised);
      continue;
    }
    offsets[i] = height;
    unplaced.remove(i);
    --unplaced_count;
    add(from, list[i].birth, height);
    add(list[i].birth, list[i].death, height + list[i].bytes);
    add(list[i].death, to, height);
  }
  return offsets;
}

}  // namespace remat::detail
