// SPDX-License-Identifier: Apache-2.0
/// @file
/// Short runs of the tree search with alternating strategies. Runs get longer from pass to pass.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <remat/core/monitor.hpp>
#include <remat/layout/packing_search.hpp>

namespace remat::detail {

/// Remaining effort: runs, and allocations that they may visit.
struct packing_effort {
  std::size_t runs, work;
  bool spent() const { return runs == 0 || work == 0; }
};

/// Runs the tree search with one strategy after the other. Chance matters: a run without a layout after some thousand nodes
/// seldom finds one soon, and another order of the same items often does at once.
/// Complexity: that of `packing_search` per run; the effort limits the sum.
class packing_portfolio {
 public:
  /// @param p    the problem; must outlive this object
  /// @param seed seed of the random changes to the strategies
  packing_portfolio(const packing_problem& p, std::uint64_t seed) : p_(p), search_(p), random_(seed) {
    double longest = 0, largest = 0;
    bytes_t highest = 0;
    for (const auto& x : p.items) {
      longest = std::max(longest, x.duration);
      largest = std::max(largest, static_cast<double>(x.size));
    }
    const auto& cliques = search_.state().cliques();
    for (const auto& q : cliques) highest = std::max(highest, q.load);
    for (const auto& x : p.items) {
      const auto wide = x.duration / longest, high = static_cast<double>(x.size) / largest;
      bytes_t load = 0;
      for (auto c = x.first; c <= x.last; ++c) load = std::max(load, cliques[c].load);
      const auto crowding = 10 * static_cast<double>(load) / static_cast<double>(highest);
      const std::array<double, keys> item_keys = {high, wide, high * wide, crowding + high * wide, crowding + wide};
      for (std::size_t k = 0; k < keys; ++k) keys_[k].push_back(item_keys[k]);
    }
  }

  /// Runs the tree search for one capacity.
  /// @param capacity units
  /// @param runs     limit on the runs of this call
  /// @param effort   remaining effort; counted down
  /// @return found; exhausted: no layout fits; cut: unknown
  packing_search::outcome fit(bytes_t capacity, std::size_t runs, packing_effort& effort, const monitor& m) {
    for (; runs > 0 && !effort.spent() && !m.stopped(); --runs) {
      const auto strategy = next_strategy();
      const auto nodes = (shortest + p_.items.size()) << std::min<std::size_t>(runs_done_ / strategies.size() / 2, 20);
      ++runs_done_;
      const auto answer = search_.run(strategy, capacity, nodes, effort.work, m);
      effort.work -= std::min(effort.work, search_.work());
      --effort.runs;
      if (answer != packing_search::outcome::cut) return answer;
    }
    return packing_search::outcome::cut;
  }

  /// Offset of an item after `fit` has found a layout, units.
  bytes_t offset(index_t item) const { return search_.offset(item); }

 private:
  enum key { size, duration, area, load_area, load_duration, keys };
  using rule = packing_strategy::rule;
  static constexpr std::size_t shortest = 1000;  ///< nodes of the shortest run, besides one node per item
  static constexpr std::array<std::pair<rule, key>, 11> strategies = {{{rule::lowest_floor, size},
                                                                       {rule::weighted_floor, duration},
                                                                       {rule::lowest_floor, duration},
                                                                       {rule::weighted_floor, area},
                                                                       {rule::lowest_floor, area},
                                                                       {rule::few_branches, size},
                                                                       {rule::weighted_floor, size},
                                                                       {rule::lowest_floor, load_area},
                                                                       {rule::few_branches, duration},
                                                                       {rule::weighted_floor, load_area},
                                                                       {rule::lowest_floor, load_duration}}};

  packing_strategy next_strategy() {
    const auto& [clique, by] = strategies[runs_done_ % strategies.size()];
    packing_strategy s{clique, keys_[by], false};
    if (runs_done_ < strategies.size()) return s;
    const auto fraction = [&] { return static_cast<double>(random_() >> 11) * 0x1p-53; };
    const auto noise = 0.5 * fraction();
    for (auto& k : s.keys) k *= 1 + noise * fraction();
    s.sorted_twins = random_() % 2 == 0;
    return s;
  }

  const packing_problem& p_;
  packing_search search_;
  std::mt19937_64 random_;
  std::array<std::vector<double>, keys> keys_;
  std::size_t runs_done_ = 0;
};

}  // namespace remat::detail
