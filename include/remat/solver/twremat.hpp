// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recursive schedules from balanced separators of a tree decomposition.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/retain_more.hpp>
#include <remat/structure/separator_tree.hpp>

namespace remat {

namespace detail {

/// The recursion of `order_by_separators`. An operation with a positive count in `hold_count_` has its results on the device.
class separator_walk {
 public:
  separator_walk(const problem& p, const structure::separator_tree& tree, std::size_t leaf, std::size_t limit,
                 const std::function<bool()>& stop)
      : p_(p),
        tree_(tree),
        leaf_(leaf),
        limit_(limit),
        stop_(stop),
        first_producer_(p.operations().size() + 1, 0),
        hold_count_(p.operations().size(), 0),
        visited_(hold_count_.size(), 0),
        stage_(hold_count_.size(), 0) {
    for (operation_id o = 0; o < hold_count_.size(); ++o) {
      for (auto v : p.operations()[o].inputs)
        if (!p.is_source(v)) producers_.push_back(p.producer(v));
      first_producer_[o + 1] = producers_.size();
    }
  }

  /// Computes the operations of `wanted` whose results are missing, and adds 1 to the count of each.
  /// @param wanted operations within `part`
  /// @return false if it gave up
  bool compute(std::size_t part, const std::vector<operation_id>& wanted) {
    const auto& this_part = tree_.parts()[part];
    std::vector<operation_id> missing;
    for (auto o : wanted) {
      if (hold_count_[o] > 0)
        ++hold_count_[o];
      else
        missing.push_back(o);
    }
    if (missing.empty()) return true;
    auto own = closure(part, missing);  // operations computed here, whose results stay until the end
    const bool divided = !this_part.children.empty() && this_part.operations > leaf_;
    const auto children = divided ? this_part.children.size() : 0;
    std::vector<std::vector<std::pair<index_t, operation_id>>> wanted_later(children);  // stage, wanted operation
    if (divided) {
      own = separator(part, own);
      for (auto o : missing)
        if (tree_.part_of(o) != part) wanted_later[child(this_part, o)].emplace_back(stage_[o], o);
    }
    std::vector<std::vector<operation_id>> reads(children);
    for (std::size_t k = 0; k < own.size(); ++k) {
      if (divided) {
        for (auto producer : producers(own[k]))
          if (tree_.is_within(producer, part) && tree_.part_of(producer) != part)
            reads[child(this_part, producer)].push_back(producer);
        for (std::size_t c = 0; c < reads.size(); ++c)
          if (!reads[c].empty() && !compute(this_part.children[c], with_ready(reads[c], wanted_later[c], k))) return false;
      }
      if (!run(own[k])) return false;
      for (auto& list : reads) {
        for (auto o : list) --hold_count_[o];
        list.clear();
      }
    }
    for (std::size_t c = 0; c < wanted_later.size(); ++c)
      if (!wanted_later[c].empty() && !compute(this_part.children[c], with_ready({}, wanted_later[c], own.size()))) return false;
    for (auto o : missing)
      if (!divided || tree_.part_of(o) == part) ++hold_count_[o];
    for (auto o : own) --hold_count_[o];
    return true;
  }

  std::vector<operation_id>& order() { return order_; }

 private:
  /// The operations that make the inputs of `o`.
  std::span<const operation_id> producers(operation_id o) const {
    return {producers_.data() + first_producer_[o], first_producer_[o + 1] - first_producer_[o]};
  }
  /// The operations within `part` that have to run for `wanted`, ascending.
  std::vector<operation_id> closure(std::size_t part, const std::vector<operation_id>& wanted) {
    ++stamp_;
    std::vector<operation_id> list;
    const auto add = [&](operation_id o) {
      if (hold_count_[o] > 0 || visited_[o] == stamp_ || !tree_.is_within(o, part)) return;
      visited_[o] = stamp_;
      list.push_back(o);
    };
    for (auto o : wanted) add(o);
    for (std::size_t i = 0; i < list.size(); ++i)
      for (auto producer : producers(list[i])) add(producer);
    if (list.empty()) return list;
    const auto [low, high] = std::minmax_element(list.begin(), list.end());
    const operation_id first = *low, last = *high;
    if (last - first > 16 * list.size()) {
      std::sort(list.begin(), list.end());
    } else {  // most are neighbours: a pass over the marks is faster than a sort
      list.clear();
      for (auto o = first; o <= last; ++o)
        if (visited_[o] == stamp_) list.push_back(o);
    }
    return list;
  }
  /// The operations of `list`, the last closure, that are in the separator of `part`. Also sets the stage of each operation in
  /// `list`: how many operations of the separator have to run before it, itself included.
  std::vector<operation_id> separator(std::size_t part, const std::vector<operation_id>& list) {
    std::vector<operation_id> chosen;
    for (auto o : list) {
      stage_[o] = 0;
      for (auto producer : producers(o))
        if (visited_[producer] == stamp_) stage_[o] = std::max(stage_[o], stage_[producer]);
      if (tree_.part_of(o) != part) continue;
      chosen.push_back(o);
      stage_[o] = static_cast<index_t>(chosen.size());
    }
    return chosen;
  }
  std::size_t child(const structure::separator_tree::part& x, operation_id o) const {
    const auto after = std::upper_bound(x.children.begin(), x.children.end(), tree_.part_of(o));
    return static_cast<std::size_t>(after - x.children.begin()) - 1;
  }
  /// Moves from `wanted_later` to `list` the operations that are wanted later and can run after `stage` operations of the
  /// separator.
  static std::vector<operation_id> with_ready(std::vector<operation_id> list,
                                              std::vector<std::pair<index_t, operation_id>>& wanted_later, std::size_t stage) {
    for (const auto& [needs, o] : wanted_later)
      if (needs <= stage) list.push_back(o);
    std::erase_if(wanted_later, [&](const auto& x) { return x.first <= stage; });
    return list;
  }
  bool run(operation_id o) {
    if (order_.size() >= limit_ || (order_.size() % 64 == 0 && stop_ && stop_())) return false;
    order_.push_back(o);
    hold_count_[o] = p_.operations()[o].once ? 2 : 1;  // results of a once-only operation stay for ever
    return true;
  }

  const problem& p_;
  const structure::separator_tree& tree_;
  std::size_t leaf_, limit_;
  const std::function<bool()>& stop_;
  std::vector<operation_id> order_;
  std::vector<operation_id> producers_;      // of all operations, one after the other
  std::vector<std::size_t> first_producer_;  // per operation: index of its first entry in `producers_`
  std::vector<index_t> hold_count_, visited_, stage_;
  index_t stamp_ = 0;
};

}  // namespace detail

/// An order of computations that keeps of each part little more than its separator. Values that the separator's operations read
/// from a child are computed in the child recursively, then dropped, and recomputed for the next reader.
///
/// With `leaf` = 1, at most (width + 1 + inputs of an operation) log2(operations) operations have results on the device at a
/// time, except those that make targets or run only once. Time is polynomial for a constant width, but may be large. Parts of at
/// most `leaf` operations are not divided: wanted results are computed in the order of the problem, without recomputation.
/// @param p     the problem
/// @param tree  its parts
/// @param leaf  most operations of a part that is not divided
/// @param limit gives up after that many computations
/// @param stop  polled now and then; true gives up
/// @return the order, or nothing
/// Complexity: O(edges executed * log(operations)).
///
/// Reference: Kumar, Purohit, Svitkina, Vee, Wang, "Efficient rematerialization for deep networks", NeurIPS 2019.
inline std::optional<std::vector<operation_id>> order_by_separators(const problem& p, const structure::separator_tree& tree,
                                                                    std::size_t leaf, std::size_t limit,
                                                                    const std::function<bool()>& stop = {}) {
  if (tree.empty()) return std::nullopt;
  std::vector<operation_id> wanted;
  for (auto v : p.targets())
    if (!p.is_source(v)) wanted.push_back(p.producer(v));
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  detail::separator_walk walk(p, tree, leaf, limit, stop);
  if (!walk.compute(0, wanted)) return std::nullopt;
  return prune_order(p, walk.order());
}

/// Tree-width rematerialization: orders that recompute recursively around balanced separators of a tree decomposition. Tries
/// several sizes of parts that are not divided; the larger they are, the fewer recomputations. Each order is offered as it is and
/// after `eviction` within the budget; `retain_more` improves the best.
///
/// For graphs of any shape, also of thousands of operations; best where the width is small. Does not use copies to the host.
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
    double shrink = 1.5;           ///< ratio of a size of undivided parts to the next size, in [1.01, 100]
    std::size_t repetitions = 32;  ///< most computations of an order, times those of store-all, >= 1
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
  void search(const problem& p, const std::vector<operation_id>& needed, bytes_t budget, incumbent& best, monitor& m) const {
    const auto stop = m.stop_check();
    const auto report = [&](const char* stage) { best.report(m, stage); };
    const structure::separator_tree tree(p, needed, stop);
    best.report(m, "separators of width " + std::to_string(tree.width()));
    std::vector<std::vector<operation_id>> orders = {needed}, improving_orders;
    for (auto leaf = needed.size() - 1; leaf > 0 && !stop();) {
      auto order = order_by_separators(p, tree, leaf, options_.repetitions * needed.size(), stop);
      if (!order) break;  // smaller parts give longer orders
      if (*order != orders.back()) {
        if (best.offer(*order)) report("separators");
        orders.push_back(std::move(*order));
      }
      leaf = std::min(leaf - 1, static_cast<std::size_t>(static_cast<double>(leaf) / options_.shrink));
    }
    if (best.found()) improving_orders.push_back(best.order());
    for (const double distance : order::eviction::distances)
      for (const auto& start : orders) {
        if (stop()) break;
        auto order = order::eviction(p, start).run(budget, {.distance = distance}, stop);
        if (order && best.offer(*order)) {
          report("evictions");
          improving_orders.push_back(std::move(*order));
        }
      }
    for (std::size_t i = improving_orders.size(); i-- > 0 && i + 4 >= improving_orders.size() && !stop();)
      if (best.offer(order::retain_more(p, improving_orders[i], budget, stop))) report("retention");
  }

  options options_;
};

}  // namespace remat
