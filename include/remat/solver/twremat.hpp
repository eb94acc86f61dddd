// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recursive schedules from balanced separators of a tree decomposition.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// Needed operations divided by separators, recursively: the operations of a part's separator keep those of its children apart,
/// and a child has at most half of the part's. Operations are neighbours if one reads what the other yields.
///
/// From a tree decomposition by minimum-degree elimination: a separator is a bag in the middle of its tree, and so has at most
/// width + 1 operations.
///
/// Complexity: O(operations width^2 log(operations)) time, O(operations width) space.
class separator_tree {
 public:
  struct part {
    std::vector<index_t> separator;     ///< operations, ascending; all of the part's if it has no children
    std::vector<std::size_t> children;  ///< indices of parts
    std::size_t operations = 0;         ///< of the separator and of all descendants
    std::size_t end = 0;                ///< part i and its descendants are the parts i to end - 1
  };

  /// @param p      the problem
  /// @param needed `needed_operations(p)`
  /// @param stop   polled; true leaves the tree empty
  separator_tree(const problem& p, const std::vector<index_t>& needed, const std::function<bool()>& stop = {})
      : home_(p.operations().size(), 0) {
    if (decompose(p, needed, stop)) divide(needed.size());
  }

  bool empty() const { return parts_.empty(); }
  /// The first part is the whole.
  const std::vector<part>& parts() const { return parts_; }
  /// The part that has `operation`, a needed one, in its separator.
  std::size_t home(index_t operation) const { return home_[operation]; }
  /// Whether `operation` belongs to part `which` or to a descendant.
  bool within(index_t operation, std::size_t which) const {
    return which <= home_[operation] && home_[operation] < parts_[which].end;
  }
  /// The largest bag less one.
  std::size_t width() const { return width_; }

 private:
  struct bag {
    std::vector<std::size_t> operations;  // positions in `needed`; the first one is eliminated here
    std::vector<std::size_t> neighbours;  // bags
  };

  /// Eliminates operations of minimum degree, one after the other.
  bool decompose(const problem& p, const std::vector<index_t>& needed, const std::function<bool()>& stop) {
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
    std::set<std::pair<std::size_t, std::size_t>> queue;  // degree, operation
    for (std::size_t i = 0; i < n; ++i) {
      std::sort(adjacent[i].begin(), adjacent[i].end());
      adjacent[i].erase(std::unique(adjacent[i].begin(), adjacent[i].end()), adjacent[i].end());
      queue.emplace(adjacent[i].size(), i);
    }
    bags_.resize(n);
    std::vector<std::size_t> turn(n, n), order, merged;
    while (!queue.empty()) {
      if (stop && stop()) return false;
      const auto x = queue.begin()->second;
      queue.erase(queue.begin());
      turn[x] = order.size();
      order.push_back(x);
      const auto around = std::move(adjacent[x]);
      for (auto y : around) {
        queue.erase({adjacent[y].size(), y});
        merged.clear();
        std::set_union(adjacent[y].begin(), adjacent[y].end(), around.begin(), around.end(), std::back_inserter(merged));
        std::erase_if(merged, [&](std::size_t z) { return z == x || z == y; });
        adjacent[y] = merged;
        queue.emplace(merged.size(), y);
      }
      width_ = std::max(width_, around.size());
      bags_[x].operations = {x};
      bags_[x].operations.insert(bags_[x].operations.end(), around.begin(), around.end());
    }
    // A bag hangs on that of its next operation to be eliminated; trees of graphs in several pieces hang one on the other.
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

  /// Takes out the bag in the middle of a tree, and so on with what is left.
  void divide(std::size_t n) {
    struct task {
      std::size_t any, above;  // a bag of the tree; the part it belongs under
    };
    std::vector<bool> gone(n, false), placed(n, false);
    std::vector<std::size_t> weight(n, 0), parent(n, n), tree;
    std::vector<task> stack;
    if (n > 0) stack.push_back({0, none});
    while (!stack.empty()) {
      const auto now = stack.back();
      stack.pop_back();
      tree = {now.any};
      parent[now.any] = n;
      for (std::size_t i = 0; i < tree.size(); ++i)
        for (auto y : bags_[tree[i]].neighbours)
          if (!gone[y] && y != parent[tree[i]]) {
            parent[y] = tree[i];
            tree.push_back(y);
          }
      for (auto x : tree) weight[x] = placed[x] ? 0 : 1;
      for (auto i = tree.size(); i-- > 1;) weight[parent[tree[i]]] += weight[tree[i]];
      const auto total = weight[now.any];
      if (total == 0) continue;
      auto middle = now.any;
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
      auto under = now.above;
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
    for (std::size_t i = parts_.size(); i-- > 0;) {  // a part's descendants follow it
      parts_[i].end = std::max(parts_[i].end, i + 1);
      for (auto c : parts_[i].children) parts_[i].end = std::max(parts_[i].end, parts_[c].end);
    }
  }

  std::vector<index_t> operations_;
  std::vector<std::size_t> home_;
  std::vector<bag> bags_;
  std::vector<part> parts_;
  std::size_t width_ = 0;
};

namespace detail {

/// The recursion of `order_by_separators`. An operation that is held has its results on the device.
class separator_walk {
 public:
  separator_walk(const problem& p, const separator_tree& tree, std::size_t leaf, std::size_t most,
                 const std::function<bool()>& stop)
      : p_(p),
        tree_(tree),
        leaf_(leaf),
        most_(most),
        stop_(stop),
        holds_(p.operations().size(), 0),
        mark_(holds_.size(), 0),
        stage_(holds_.size(), 0) {}

  /// Computes what is not held of `wanted`, operations within `part`, and holds each once more.
  /// @return false if it gave up
  bool compute(std::size_t part, const std::vector<index_t>& wanted) {
    const auto& here = tree_.parts()[part];
    std::vector<index_t> missing;
    for (auto o : wanted) {
      if (holds_[o] > 0)
        ++holds_[o];
      else
        missing.push_back(o);
    }
    if (missing.empty()) return true;
    auto own = closure(part, missing);  // what is computed here, and held until the end
    const bool divided = !here.children.empty() && here.operations > leaf_;
    std::vector<std::vector<std::pair<std::size_t, index_t>>> pending(here.children.size());  // stage, wanted operation
    if (divided) {
      own = separator(part, own);
      for (auto o : missing)
        if (tree_.home(o) != part) pending[child(here, o)].emplace_back(stage_[o], o);
    }
    std::vector<std::vector<index_t>> reads(here.children.size());
    for (std::size_t k = 0; k < own.size(); ++k) {
      if (divided) {
        for (auto v : p_.operations()[own[k]].inputs)
          if (!p_.is_source(v) && tree_.within(p_.producer(v), part) && tree_.home(p_.producer(v)) != part)
            reads[child(here, p_.producer(v))].push_back(p_.producer(v));
        for (std::size_t c = 0; c < reads.size(); ++c)
          if (!reads[c].empty() && !compute(here.children[c], with_pending(reads[c], pending[c], k))) return false;
      }
      if (!run(own[k])) return false;
      for (auto& list : reads) {
        for (auto o : list) --holds_[o];
        list.clear();
      }
    }
    for (std::size_t c = 0; c < pending.size(); ++c)
      if (!pending[c].empty() && !compute(here.children[c], with_pending({}, pending[c], own.size()))) return false;
    for (auto o : missing)
      if (!divided || tree_.home(o) == part) ++holds_[o];
    for (auto o : own) --holds_[o];
    return true;
  }

  std::vector<index_t>& order() { return order_; }

 private:
  /// The operations within `part` that `wanted` needs and that are not held, ascending.
  std::vector<index_t> closure(std::size_t part, const std::vector<index_t>& wanted) {
    ++stamp_;
    std::vector<index_t> list;
    const auto add = [&](index_t o) {
      if (holds_[o] > 0 || mark_[o] == stamp_ || !tree_.within(o, part)) return;
      mark_[o] = stamp_;
      list.push_back(o);
    };
    for (auto o : wanted) add(o);
    for (std::size_t i = 0; i < list.size(); ++i)
      for (auto v : p_.operations()[list[i]].inputs)
        if (!p_.is_source(v)) add(p_.producer(v));
    std::sort(list.begin(), list.end());
    return list;
  }
  /// Those of `list`, the last closure, that are in the separator of `part`. Sets the stage of each of the list: how many of the
  /// separator have to come before it, itself included.
  std::vector<index_t> separator(std::size_t part, const std::vector<index_t>& list) {
    std::vector<index_t> found;
    for (auto o : list) {
      stage_[o] = 0;
      for (auto v : p_.operations()[o].inputs)
        if (!p_.is_source(v) && mark_[p_.producer(v)] == stamp_) stage_[o] = std::max(stage_[o], stage_[p_.producer(v)]);
      if (tree_.home(o) != part) continue;
      found.push_back(o);
      stage_[o] = found.size();
    }
    return found;
  }
  std::size_t child(const separator_tree::part& x, index_t o) const {
    const auto after = std::upper_bound(x.children.begin(), x.children.end(), tree_.home(o));
    return static_cast<std::size_t>(after - x.children.begin()) - 1;
  }
  /// `list` and, taken out of `pending`, what is wanted later and can be computed after `stage` operations of the separator.
  static std::vector<index_t> with_pending(std::vector<index_t> list, std::vector<std::pair<std::size_t, index_t>>& pending,
                                           std::size_t stage) {
    for (const auto& [needs, o] : pending)
      if (needs <= stage) list.push_back(o);
    std::erase_if(pending, [&](const auto& x) { return x.first <= stage; });
    return list;
  }
  bool run(index_t o) {
    if (order_.size() >= most_ || (order_.size() % 64 == 0 && stop_ && stop_())) return false;
    order_.push_back(o);
    holds_[o] = p_.operations()[o].once ? 2 : 1;  // for ever, if it cannot run again
    return true;
  }

  const problem& p_;
  const separator_tree& tree_;
  std::size_t leaf_, most_;
  const std::function<bool()>& stop_;
  std::vector<index_t> order_;
  std::vector<std::size_t> holds_, mark_, stage_;
  std::size_t stamp_ = 0;
};

}  // namespace detail

/// An order of computations that keeps of each part little more than its separator: what the separator's operations read in a
/// child is computed in the child, recursively, forgotten, and computed again for the next one that reads it.
///
/// With `leaf` = 1, at most (width + 1 + inputs of an operation) log2(operations) operations have results on the device at a
/// time, those that targets need or that run once only excepted. Time is polynomial for a constant width, but may be large. Parts
/// of at most `leaf` operations are not divided: what is wanted of them is computed in the order of the problem, and nothing
/// twice.
/// @param p    the problem
/// @param tree its parts
/// @param leaf size of parts that are not divided
/// @param most gives up after that many computations
/// @param stop polled now and then; true gives up
/// @return the order, or nothing
/// Complexity: O(edges executed * log(operations)).
///
/// Reference: Kumar, Purohit, Svitkina, Vee, Wang, "Efficient rematerialization for deep networks", NeurIPS 2019.
inline std::optional<std::vector<index_t>> order_by_separators(const problem& p, const separator_tree& tree, std::size_t leaf,
                                                               std::size_t most, const std::function<bool()>& stop = {}) {
  if (tree.empty()) return std::nullopt;
  std::vector<index_t> wanted;
  for (auto v : p.targets())
    if (!p.is_source(v)) wanted.push_back(p.producer(v));
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  detail::separator_walk walk(p, tree, leaf, most, stop);
  if (!walk.compute(0, wanted)) return std::nullopt;
  return prune_order(p, walk.order());
}

/// Tree-width rematerialization: orders that recompute recursively around balanced separators of a tree decomposition, for parts
/// of several sizes that are not divided, the fewer recomputations the larger they are. Each is played as it is and within the
/// budget by `eviction`; `retain_more` improves the best.
///
/// For graphs of any shape, also of thousands of operations; best where the width is small. Copies to the host are not used.
///
/// Complexity: that of `separator_tree`, and some dozens of orders and evictions.
///
/// Reference: Kumar, Purohit, Svitkina, Vee, Wang, "Efficient rematerialization for deep networks", NeurIPS 2019; written from
/// the idea of the paper.
/// @code
/// auto r = remat::solve(p, budget, remat::twremat{}, {.seconds = 10});
/// @endcode
class twremat {
 public:
  struct options {
    double shrink = 1.5;           ///< ratio of one size of undivided parts to the next, in [1.01, 100]
    std::size_t repetitions = 32;  ///< orders get at most this many times as long as store-all's, >= 1
  };

  twremat() : twremat(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit twremat(const options& o) : options_(o) {
    if (!(o.shrink >= 1.01 && o.shrink <= 100))
      throw bad_option("twremat.shrink must be in [1.01, 100], got " + std::to_string(o.shrink));
    if (o.repetitions < 1) throw bad_option("twremat.repetitions must be >= 1, got 0");
  }

  std::string name() const { return "twremat"; }

  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    const auto needed = needed_operations(p);
    incumbent best(p, budget);
    if (!best.offer(needed)) search(p, needed, budget, best, m);
    best.put_into(r);
    return r;
  }

 private:
  void search(const problem& p, const std::vector<index_t>& needed, bytes_t budget, incumbent& best, monitor& m) const {
    const std::function<bool()> stop = [&] { return m.stopped(); };
    const auto report = [&](const char* stage) { m.report({.stage = stage, .best = best.seconds()}); };
    const separator_tree tree(p, needed, stop);
    m.report({.stage = "separators of width " + std::to_string(tree.width()), .best = best.seconds()});
    std::vector<std::vector<index_t>> orders = {needed}, good;
    for (auto leaf = needed.size() - 1; leaf > 0 && !stop();) {
      auto order = order_by_separators(p, tree, leaf, options_.repetitions * needed.size(), stop);
      if (!order) break;  // smaller ones are longer still
      if (*order != orders.back()) {
        if (best.offer(*order)) report("separators");
        orders.push_back(std::move(*order));
      }
      leaf = std::min(leaf - 1, static_cast<std::size_t>(static_cast<double>(leaf) / options_.shrink));
    }
    if (best.found()) good.push_back(best.order());
    for (const double distance : {1.0, 0.5, 2.0})
      for (const auto& start : orders) {
        if (stop()) break;
        auto order = eviction(p, start).run(budget, {.distance = distance}, stop);
        if (order && best.offer(*order)) {
          report("evictions");
          good.push_back(std::move(*order));
        }
      }
    for (std::size_t i = good.size(); i-- > 0 && i + 4 >= good.size() && !stop();)
      if (best.offer(retain_more(p, good[i], budget, stop))) report("retention");
  }

  options options_;
};

}  // namespace remat
