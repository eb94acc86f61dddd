// SPDX-License-Identifier: Apache-2.0
/// @file
/// Balanced separators of a tree decomposition.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <queue>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat::structure {

/// Recursive division of the needed operations by balanced separators. The separator of a part disconnects its children from
/// each other. A child has at most half of the operations of its parent. Two operations are neighbours if one reads a value that
/// the other makes.
///
/// The separators come from a tree decomposition by minimum-degree elimination. A separator is a bag in the middle of a tree, so
/// it has at most width + 1 operations.
///
/// Complexity: O(operations width^2 log(operations)) time, O(operations width) space.
class separator_tree {
 public:
  struct part {
    std::vector<operation_id> separator;  ///< operations, ascending; all operations of the part if it has no children
    std::vector<std::size_t> children;    ///< indices of parts
    std::size_t operations = 0;           ///< number of operations in the separator and in all descendants
    std::size_t end = 0;                  ///< part i and its descendants are the parts i to end - 1
  };

  /// @param p      the problem
  /// @param needed `needed_operations(p)`
  /// @param stop   polled; true leaves the tree empty. Bags of more than `max_entries` operations in total leave it empty, too.
  separator_tree(const problem& p, const std::vector<operation_id>& needed, const std::function<bool()>& stop = {})
      : home_(p.operations().size(), 0) {
    if (decompose(p, needed, stop)) divide(needed.size());
  }

  static constexpr std::size_t max_entries = 20'000'000;
  bool empty() const { return parts_.empty(); }
  /// The first part is the root.
  const std::vector<part>& parts() const { return parts_; }
  /// The part whose separator contains `operation`, a needed operation.
  std::size_t home(operation_id operation) const { return home_[operation]; }
  /// True if `operation` belongs to part `which` or to a descendant.
  bool within(operation_id operation, std::size_t which) const {
    return which <= home_[operation] && home_[operation] < parts_[which].end;
  }
  /// Width of the tree decomposition: size of the largest bag minus 1.
  std::size_t width() const { return width_; }

 private:
  struct bag {
    std::vector<std::size_t> operations;  // positions in `needed`; the first one is eliminated here
    std::vector<std::size_t> neighbours;  // bags
  };

  /// Computes the bags: eliminates operations of minimum degree, one after the other. @return false if it gave up
  bool decompose(const problem& p, const std::vector<operation_id>& needed, const std::function<bool()>& stop) {
    const auto n = needed.size();
    operations_ = needed;
    std::vector<std::size_t> place(p.operations().size(), n);
    for (std::size_t i = 0; i < n; ++i) place[needed[i]] = i;
    std::vector<std::vector<std::size_t>> adjacent(n);  // ascending
    for (std::size_t i = 0; i < n; ++i)
      for (auto v : p.operations()[needed[i]].inputs)
        if (!p.is_source(v)) {
          adjacent[i].push_back(place[p.producer(v)]);
          adjacent[place[p.producer(v)]].push_back(i);
        }
    using entry = std::pair<index_t, index_t>;                             // degree, operation
    std::priority_queue<entry, std::vector<entry>, std::greater<>> queue;  // also holds outdated entries
    const auto enqueue = [&](std::size_t x) { queue.emplace(static_cast<index_t>(adjacent[x].size()), static_cast<index_t>(x)); };
    for (std::size_t i = 0; i < n; ++i) {
      std::sort(adjacent[i].begin(), adjacent[i].end());
      adjacent[i].erase(std::unique(adjacent[i].begin(), adjacent[i].end()), adjacent[i].end());
      enqueue(i);
    }
    bags_.resize(n);
    std::vector<std::size_t> turn(n, n), order, merged;
    constexpr std::size_t few_of = 16;  // a list this many times as long as another shares few entries with it
    std::size_t entries = 0;
    while (!queue.empty()) {
      if (entries > max_entries || (stop && stop())) return false;
      const auto [degree, x] = queue.top();
      queue.pop();
      if (turn[x] < n || degree != adjacent[x].size()) continue;
      turn[x] = order.size();
      order.push_back(x);
      auto around = std::move(adjacent[x]);
      for (auto y : around) {
        auto& list = adjacent[y];
        const auto before = list.size();
        if (around.size() * few_of < list.size()) {  // few entries of a long list change: insert them
          list.erase(std::lower_bound(list.begin(), list.end(), x));
          for (auto z : around)
            if (const auto at = std::lower_bound(list.begin(), list.end(), z); z != y && (at == list.end() || *at != z))
              list.insert(at, z);
        } else {
          merged.clear();
          std::set_union(list.begin(), list.end(), around.begin(), around.end(), std::back_inserter(merged));
          std::erase_if(merged, [&, gone = x](std::size_t z) { return z == gone || z == y; });
          list = merged;
        }
        if (list.size() != before) enqueue(y);
      }
      width_ = std::max(width_, around.size());
      entries += 1 + around.size();
      around.insert(around.begin(), x);
      bags_[x].operations = std::move(around);
    }
    // The parent of a bag is the bag of its operation that is eliminated next. A graph of several pieces has several trees,
    // which are chained.
    for (std::size_t k = 0; k + 1 < n; ++k) {
      auto next = n;
      for (auto y : bags_[order[k]].operations)
        if (turn[y] > k) next = std::min(next, turn[y]);
      const auto above = order[next == n ? k + 1 : next];
      bags_[order[k]].neighbours.push_back(above);
      bags_[above].neighbours.push_back(order[k]);
    }
    return true;
  }

  /// Removes the bag in the middle of a tree, and divides the remaining trees in the same way.
  void divide(std::size_t n) {
    struct task {
      std::size_t any, above;  // a bag of the tree; the parent part of the tree
    };
    std::vector<bool> gone(n, false), placed(n, false);
    std::vector<std::size_t> weight(n, 0), parent(n, n), tree;
    std::vector<task> stack;
    if (n > 0) stack.push_back({0, none});
    while (!stack.empty()) {
      const auto top = stack.back();
      stack.pop_back();
      tree = {top.any};
      parent[top.any] = n;
      for (std::size_t i = 0; i < tree.size(); ++i)
        for (auto y : bags_[tree[i]].neighbours)
          if (!gone[y] && y != parent[tree[i]]) {
            parent[y] = tree[i];
            tree.push_back(y);
          }
      for (auto x : tree) weight[x] = placed[x] ? 0 : 1;
      for (auto i = tree.size(); i-- > 1;) weight[parent[tree[i]]] += weight[tree[i]];
      const auto total = weight[top.any];
      if (total == 0) continue;
      auto middle = top.any;
      for (bool deeper = true; deeper;) {
        deeper = false;
        for (auto y : bags_[middle].neighbours)
          if (!gone[y] && parent[y] == middle && 2 * weight[y] > total) {
            middle = y;
            deeper = true;
            break;
          }
      }
      gone[middle] = true;
      auto under = top.above;
      part x;
      for (auto y : bags_[middle].operations)
        if (!placed[y]) {
          placed[y] = true;
          home_[operations_[y]] = parts_.size();
          x.separator.push_back(operations_[y]);
        }
      if (!x.separator.empty()) {
        std::sort(x.separator.begin(), x.separator.end());
        x.operations = total;
        if (under != none) parts_[under].children.push_back(parts_.size());
        under = parts_.size();
        parts_.push_back(std::move(x));
      }
      for (auto y : bags_[middle].neighbours)
        if (!gone[y]) stack.push_back({y, under});
    }
    bags_.clear();
    for (std::size_t i = parts_.size(); i-- > 0;) {  // the descendants of a part follow the part
      parts_[i].end = std::max(parts_[i].end, i + 1);
      for (auto c : parts_[i].children) parts_[i].end = std::max(parts_[i].end, parts_[c].end);
    }
  }

  std::vector<operation_id> operations_;
  std::vector<std::size_t> home_;
  std::vector<bag> bags_;
  std::vector<part> parts_;
  std::size_t width_ = 0;
};

}  // namespace remat::structure
