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
      : part_of_(p.operations().size(), 0) {
    if (decompose(p, needed, stop)) divide(needed.size());
  }

  static constexpr std::size_t max_entries = 20'000'000;
  bool empty() const { return parts_.empty(); }
  /// The first part is the root.
  const std::vector<part>& parts() const { return parts_; }
  /// The part whose separator contains `operation`, a needed operation.
  std::size_t part_of(operation_id operation) const { return part_of_[operation]; }
  /// True if `operation` belongs to part `part_index` or to a descendant.
  bool is_within(operation_id operation, std::size_t part_index) const {
    return part_index <= part_of_[operation] && part_of_[operation] < parts_[part_index].end;
  }
  /// Width of the tree decomposition: size of the largest bag minus 1.
  std::size_t width() const { return width_; }

 private:
  struct bag {
    std::vector<std::size_t> operations;  // positions in `needed`; the first one is eliminated here
    std::vector<std::size_t> neighbours;  // bags
  };

  using operation_list = std::vector<std::size_t>;  // positions in `needed`, ascending

  /// Per needed operation: its neighbours.
  static std::vector<operation_list> neighbours_of(const problem& p, const std::vector<operation_id>& needed) {
    std::vector<std::size_t> position(p.operations().size(), needed.size());
    for (std::size_t i = 0; i < needed.size(); ++i) position[needed[i]] = i;
    std::vector<operation_list> adjacent(needed.size());
    for (std::size_t i = 0; i < needed.size(); ++i)
      for (auto v : p.operations()[needed[i]].inputs)
        if (!p.is_source(v)) {
          adjacent[i].push_back(position[p.producer(v)]);
          adjacent[position[p.producer(v)]].push_back(i);
        }
    for (auto& list : adjacent) {
      std::sort(list.begin(), list.end());
      list.erase(std::unique(list.begin(), list.end()), list.end());
    }
    return adjacent;
  }

  /// Computes the bags: eliminates operations of minimum degree, one after the other. @return false if it gave up
  bool decompose(const problem& p, const std::vector<operation_id>& needed, const std::function<bool()>& stop) {
    const auto n = needed.size();
    operations_ = needed;
    auto adjacent = neighbours_of(p, needed);
    using entry = std::pair<index_t, index_t>;                             // degree, operation
    std::priority_queue<entry, std::vector<entry>, std::greater<>> queue;  // also holds outdated entries
    const auto enqueue = [&](std::size_t x) { queue.emplace(static_cast<index_t>(adjacent[x].size()), static_cast<index_t>(x)); };
    for (std::size_t i = 0; i < n; ++i) enqueue(i);
    bags_.resize(n);
    std::vector<std::size_t> rank(n, n), order;  // per operation: its position in the order of elimination; that order
    std::size_t entries = 0;
    while (!queue.empty()) {
      if (entries > max_entries || (stop && stop())) return false;
      const auto [degree, x] = queue.top();
      queue.pop();
      if (rank[x] < n || degree != adjacent[x].size()) continue;
      rank[x] = order.size();
      order.push_back(x);
      auto neighbours = std::move(adjacent[x]);
      for (auto y : neighbours) {
        const auto before = adjacent[y].size();
        replace_neighbour(adjacent[y], y, x, neighbours);
        if (adjacent[y].size() != before) enqueue(y);
      }
      width_ = std::max(width_, neighbours.size());
      entries += 1 + neighbours.size();
      neighbours.insert(neighbours.begin(), x);
      bags_[x].operations = std::move(neighbours);
    }
    connect_bags(rank, order);
    return true;
  }

  /// Replaces the eliminated operation `x` by its neighbours.
  /// @param list         the neighbours of `y`
  /// @param x_neighbours the neighbours of `x`
  void replace_neighbour(operation_list& list, std::size_t y, std::size_t x, const operation_list& x_neighbours) {
    constexpr std::size_t min_ratio = 16;                 // a list this many times as long as another shares few entries with it
    if (x_neighbours.size() * min_ratio < list.size()) {  // few entries of a long list change: insert them
      list.erase(std::lower_bound(list.begin(), list.end(), x));
      for (auto z : x_neighbours)
        if (const auto at = std::lower_bound(list.begin(), list.end(), z); z != y && (at == list.end() || *at != z))
          list.insert(at, z);
    } else {
      merged_.clear();
      std::set_union(list.begin(), list.end(), x_neighbours.begin(), x_neighbours.end(), std::back_inserter(merged_));
      std::erase_if(merged_, [&](std::size_t z) { return z == x || z == y; });
      list = merged_;
    }
  }

  /// Makes a tree of the bags. The parent of a bag is the bag of its operation that is eliminated next. A graph of several pieces
  /// has several trees, which are chained.
  /// @param rank  per operation: its position in `order`
  /// @param order operations in the order of elimination
  void connect_bags(const std::vector<std::size_t>& rank, const std::vector<std::size_t>& order) {
    const auto n = order.size();
    for (std::size_t k = 0; k + 1 < n; ++k) {
      auto next = n;
      for (auto y : bags_[order[k]].operations)
        if (rank[y] > k) next = std::min(next, rank[y]);
      const auto parent = order[next == n ? k + 1 : next];
      bags_[order[k]].neighbours.push_back(parent);
      bags_[parent].neighbours.push_back(order[k]);
    }
  }

  /// Removes the bag in the middle of a tree, and divides the remaining trees in the same way.
  void divide(std::size_t n) {
    struct task {
      std::size_t any_bag, parent_part;  // a bag of the tree; the parent part of the tree
    };
    std::vector<bool> removed(n, false), placed(n, false);
    std::vector<std::size_t> weight(n, 0), parent(n, n), tree;
    std::vector<task> stack;
    if (n > 0) stack.push_back({0, none});
    while (!stack.empty()) {
      const auto top = stack.back();
      stack.pop_back();
      tree = {top.any_bag};
      parent[top.any_bag] = n;
      for (std::size_t i = 0; i < tree.size(); ++i)
        for (auto y : bags_[tree[i]].neighbours)
          if (!removed[y] && y != parent[tree[i]]) {
            parent[y] = tree[i];
            tree.push_back(y);
          }
      for (auto x : tree) weight[x] = placed[x] ? 0 : 1;
      for (auto i = tree.size(); i-- > 1;) weight[parent[tree[i]]] += weight[tree[i]];
      const auto total = weight[top.any_bag];
      if (total == 0) continue;
      auto middle = top.any_bag;
      for (bool deeper = true; deeper;) {
        deeper = false;
        for (auto y : bags_[middle].neighbours)
          if (!removed[y] && parent[y] == middle && 2 * weight[y] > total) {
            middle = y;
            deeper = true;
            break;
          }
      }
      removed[middle] = true;
      auto parent_part = top.parent_part;
      part x;
      for (auto y : bags_[middle].operations)
        if (!placed[y]) {
          placed[y] = true;
          part_of_[operations_[y]] = parts_.size();
          x.separator.push_back(operations_[y]);
        }
      if (!x.separator.empty()) {
        std::sort(x.separator.begin(), x.separator.end());
        x.operations = total;
        if (parent_part != none) parts_[parent_part].children.push_back(parts_.size());
        parent_part = parts_.size();
        parts_.push_back(std::move(x));
      }
      for (auto y : bags_[middle].neighbours)
        if (!removed[y]) stack.push_back({y, parent_part});
    }
    bags_.clear();
    for (std::size_t i = parts_.size(); i-- > 0;) {  // the descendants of a part follow the part
      parts_[i].end = std::max(parts_[i].end, i + 1);
      for (auto c : parts_[i].children) parts_[i].end = std::max(parts_[i].end, parts_[c].end);
    }
  }

  std::vector<operation_id> operations_;
  std::vector<std::size_t> part_of_;
  std::vector<bag> bags_;
  std::vector<part> parts_;
  std::size_t width_ = 0;
  operation_list merged_;  // scratch
};

}  // namespace remat::structure
