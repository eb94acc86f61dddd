// SPDX-License-Identifier: Apache-2.0
/// @file
/// The whole problem with its parts condensed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/hierarchy/part_problem.hpp>

namespace remat {

/// A problem in which every part is one operation for its forward and one for its backward, run in chosen ways.
///
/// The forward operation reads what its order reads from outside and yields what leaves it and, as one value, what is saved for
/// the backward. So any schedule of the condensed problem expands to one of the whole problem, by putting the orders in the place
/// of the operations; its peak is no larger, because what a part holds besides is in the workspace of its operations, and its
/// time no longer.
class condensed_problem {
 public:
  /// @param p     the whole problem
  /// @param index of the partition
  /// @param ways  one for each part
  /// Complexity: O(values + edges, those of recomputations in the ways included).
  condensed_problem(const problem& p, const part_index& index, const std::vector<const part_option*>& ways) {
    std::vector<unit> units;
    std::vector<operation_id> maker(p.values().size(), none);  // the unit that yields a value
    for (part_id i = 0; i < ways.size(); ++i) {
      if (!ways[i]->forward.empty()) units.push_back({i, false, ways[i]->forward, {}, {}});
      if (!ways[i]->backward.empty()) units.push_back({i, true, ways[i]->backward, {}, {}});
    }
    for (auto o : needed_operations(p))
      if (index.part(o) == none) units.push_back({none, false, {o}, {}, {}});
    std::vector<unsigned> made(p.values().size(), 0);
    for (operation_id u = 0; u < units.size(); ++u) {
      auto& x = units[u];
      x.first = *std::min_element(x.order.begin(), x.order.end());
      const auto own = [&](value_id v) { return x.part != none && !p.is_source(v) && index.part(p.producer(v)) == x.part; };
      for (auto o : x.order) {
        const auto& op = p.operations()[o];
        x.seconds += op.seconds;
        x.once = x.once || op.once;
        for (auto v : op.inputs)
          if (made[v] != u + 1 && !own(v)) x.reads.push_back(v);
        for (auto v : op.outputs) {
          made[v] = u + 1;
          if (maker[v] == none && index.leaves(v)) maker[v] = u, x.makes.push_back(v);
        }
      }
      if (x.part == none) {
        x.workspace = p.operations()[x.order[0]].workspace;
        for (auto v : p.operations()[x.order[0]].outputs)
          if (maker[v] != u) maker[v] = u, x.makes.push_back(v);
      } else {
        const auto& w = *ways[x.part];
        x.workspace = x.backward ? w.backward_workspace : w.forward_workspace;
        if (x.backward) x.reads.insert(x.reads.end(), w.kept.begin(), w.kept.end());
      }
    }
    build(p, ways, units, maker);
  }

  /// Is there an order of the parts? Without one, `stuck()` says why.
  bool possible() const { return stuck_.empty(); }
  const std::string& stuck() const { return stuck_; }
  const problem& condensed() const { return condensed_; }

  /// The operations of the whole problem behind an order of the condensed one.
  /// Complexity: O(values + edges executed).
  std::vector<operation_id> expand(const problem& p, const std::vector<operation_id>& order) const {
    std::vector<operation_id> all;
    for (auto u : order) all.insert(all.end(), orders_[u].begin(), orders_[u].end());
    return prune_order(p, all);
  }

 private:
  struct unit {
    part_id part;
    bool backward;
    std::vector<operation_id> order;
    std::vector<value_id> reads, makes;
    operation_id first = 0;
    double seconds = 0;
    bytes_t workspace = 0;
    bool once = false;
  };

  void build(const problem& p, const std::vector<const part_option*>& ways, std::vector<unit>& units,
             const std::vector<operation_id>& maker) {
    // A topological order of the units that follows the problem's.
    std::vector<std::vector<operation_id>> after(units.size());
    std::vector<std::size_t> missing(units.size(), 0);
    std::vector<operation_id> forward_of(ways.size(), none);
    const auto depend = [&](operation_id u, operation_id on) {
      after[on].push_back(u);
      ++missing[u];
    };
    for (operation_id u = 0; u < units.size(); ++u) {
      auto& x = units[u];
      std::sort(x.reads.begin(), x.reads.end());
      x.reads.erase(std::unique(x.reads.begin(), x.reads.end()), x.reads.end());
      if (x.part != none && !x.backward) forward_of[x.part] = u;
      for (auto v : x.reads)
        if (!p.is_source(v)) depend(u, maker[v]);
      if (x.backward && forward_of[x.part] != none) depend(u, forward_of[x.part]);
    }
    using entry = std::pair<operation_id, operation_id>;
    std::priority_queue<entry, std::vector<entry>, std::greater<>> ready;
    for (operation_id u = 0; u < units.size(); ++u)
      if (missing[u] == 0) ready.emplace(units[u].first, u);

    std::vector<value> values;
    std::vector<operation> operations;
    std::vector<value_id> local(p.values().size(), none), saved(ways.size(), none);
    const auto add = [&](value_id v) {
      if (local[v] == none) {
        local[v] = static_cast<index_t>(values.size());
        values.push_back({"", p.values()[v].bytes, p.values()[v].held});
      }
      return local[v];
    };
    for (value_id v = 0; v < p.values().size(); ++v)
      if (p.is_source(v)) add(v);
    while (!ready.empty()) {
      const auto u = ready.top().second;
      ready.pop();
      const auto& x = units[u];
      operation op{"", {}, {}, x.seconds, x.workspace, x.once};
      for (auto v : x.reads) op.inputs.push_back(add(v));
      for (auto v : x.makes) op.outputs.push_back(add(v));
      if (x.part != none && ways[x.part]->saved > 0) {
        auto& s = saved[x.part];
        if (x.backward) {
          op.inputs.push_back(s);
        } else {
          op.outputs.push_back(s = static_cast<index_t>(values.size()));
          values.push_back({"", ways[x.part]->saved, false});
        }
      }
      operations.push_back(std::move(op));
      orders_.push_back(x.order);
      for (auto w : after[u])
        if (--missing[w] == 0) ready.emplace(units[w].first, w);
    }
    if (operations.size() < units.size()) {
      const auto& x = units[static_cast<std::size_t>(
          std::find_if(missing.begin(), missing.end(), [](auto count) { return count > 0; }) - missing.begin())];
      stuck_ = "partition: no order of the parts is possible; the " + std::string(x.backward ? "backward" : "forward") +
               (x.part == none ? " of operation " + std::to_string(x.first) : " of part " + std::to_string(x.part)) +
               " depends on itself through others";
      return;
    }
    std::vector<value_id> targets;
    for (auto v : p.targets()) targets.push_back(add(v));
    condensed_ = problem("condensed", std::move(values), std::move(operations), std::move(targets));
  }

  problem condensed_;
  std::vector<std::vector<operation_id>> orders_;
  std::string stuck_;
};

}  // namespace remat
