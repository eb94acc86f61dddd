// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tree search for a layout within a capacity: at each node, who lies at the floor of a clique?
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <remat/core/monitor.hpp>
#include <remat/layout/cliques.hpp>

namespace remat::detail {

/// How one run of the search goes. Every strategy is complete.
struct packing_strategy {
  enum class rule { lowest_floor, weighted_floor, few_branches };
  rule clique = rule::lowest_floor;  ///< the clique to branch on
  std::vector<double> keys;          ///< per item: the largest is tried first
  bool sorted_twins = false;         ///< of adjacent items of equal lifetimes, the one of the larger key must lie below
};

/// Looks for offsets below a capacity.
///
/// The search builds layouts from the bottom. It looks for *bottom-justified* layouts only, in which each item lies at 0 or on
/// the top of a neighbour; a layout that fits can always be pushed down to one. Each item has a lowest offset, which rises as its
/// neighbours are placed. The floor of a clique is the least of the lowest offsets of its unplaced items. A node selects a clique
/// and branches on the item that lies at its floor, or on none of them. The branches exclude each other and leave nothing out if
/// no neighbour of these items fits below the floor, which holds at least for the clique of the lowest floor.
///
/// Pruning:
/// - the unplaced items of a clique, stacked from their lowest offsets, must end below the capacity;
/// - an item that does not lie at the floor lies on a neighbour that is still unplaced, which raises its lowest offset;
/// - cliques without a common unplaced item are solved one by one, and if one has no layout, no sibling is tried again;
/// - of equal items, only one is tried.
///
/// Dominance, decomposition in time, and portfolios of orders are those of M. D. Moffitt, "MiniMalloc: A Lightweight Memory
/// Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023. Branching on the floor of one clique is ours.
class packing_search {
 public:
  enum class outcome { found, exhausted, cut };

  /// @param p must outlive the search
  explicit packing_search(const packing_problem& p)
      : p_(p), items_(p.items.size()), cliques_(p.cliques.size()), loads_(cliques_.size(), 0), weights_(cliques_.size(), 0) {
    for (index_t c = 0; c < cliques_.size(); ++c)
      for (auto k : p.cliques[c]) loads_[c] += p.items[k].size;
    ranks_.resize(items_.size());
    stamps_.assign(cliques_.size(), 0);
    reset();
  }

  /// One run from the start. What failed in earlier runs guides it.
  /// @param capacity units
  /// @param nodes    at which the run is cut
  /// @param most_work at which it is cut as well
  /// @param work     gets the items looked at
  /// @return exhausted: no layout fits
  outcome run(const packing_strategy& s, bytes_t capacity, std::size_t nodes, std::size_t most_work, std::size_t& work,
              const monitor& m) {
    reset();
    strategy_ = &s;
    capacity_ = capacity;
    rank(s.keys);
    for (auto& w : weights_) w *= 0.9;
    work_ = 0;
    const auto result = descend(nodes, most_work, m);
    work = work_;
    return result;
  }

  /// @return per item: units; after a run that found a layout
  std::vector<bytes_t> offsets() const {
    std::vector<bytes_t> out;
    for (const auto& x : items_) out.push_back(x.lowest);
    return out;
  }

  /// Per clique: the sum of sizes, units.
  const std::vector<bytes_t>& loads() const { return loads_; }

 private:
  static constexpr bytes_t never = std::numeric_limits<bytes_t>::max();

  struct item_state {
    bytes_t lowest = 0;     ///< offset; of an unplaced item the least that is possible
    bool supported = true;  ///< it could lie there: at 0, or on the top of a placed neighbour
    bool placed = false;
  };
  /// What a node reads of a clique.
  struct summary {
    bytes_t floor = never;                           ///< least lowest offset of the unplaced items
    bytes_t lowest_top = never, second_top = never;  ///< least ends of unplaced items that lie as low as they can
    index_t lowest = none;                           ///< the item of `lowest_top`
  };
  struct clique_state : summary {
    std::vector<index_t> unplaced;  ///< about by lowest offset; behind the first `count`: the placed, the latest first
    std::size_t count = 0;
    bytes_t remains = 0;  ///< sum of the unplaced sizes
  };
  /// Cliques first..last, some of whose items are unplaced, and none of which reaches beyond.
  struct component {
    index_t first, last;
    std::size_t parent;  ///< the frame whose branch made it; `root` for none
  };
  static constexpr std::size_t root = std::numeric_limits<std::size_t>::max();
  /// Sizes of the trails, to which the state returns.
  struct mark {
    std::size_t items, summaries, placed, pending;
  };
  struct frame {
    component where;
    index_t clique = 0;
    std::vector<index_t> branches;  ///< items that may lie at the floor
    std::size_t next = 0;
    bool may_raise = false;  ///< a last branch: none of them lies there
    mark before{};
  };

  void reset() {
    std::fill(items_.begin(), items_.end(), item_state{});
    crossing_.assign(cliques_.size(), 0);
    for (index_t c = 0; c < cliques_.size(); ++c) {
      auto& q = cliques_[c];
      q.unplaced = p_.cliques[c];
      q.count = q.unplaced.size();
      q.remains = loads_[c];
      for (auto k : q.unplaced) crossing_[c] += p_.items[k].last > c;
    }
    item_trail_.clear();
    summary_trail_.clear();
    placed_.clear();
    pending_.clear();
    depth_ = 0;
  }

  void rank(const std::vector<double>& keys) {
    std::vector<index_t> order(items_.size());
    for (index_t k = 0; k < order.size(); ++k) order[k] = k;
    std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) { return keys[a] > keys[b]; });
    for (index_t r = 0; r < order.size(); ++r) ranks_[order[r]] = r;
  }

  outcome descend(std::size_t nodes, std::size_t most_work, const monitor& m) {
    for (index_t c = 0; c < cliques_.size(); ++c)
      if (!update(c)) return outcome::exhausted;
    summary_trail_.clear();
    if (!cliques_.empty()) split(0, static_cast<index_t>(cliques_.size() - 1), root);
    for (std::size_t n = 0; !pending_.empty(); ++n) {
      if (n >= nodes || work_ >= most_work || (n % 64 == 0 && m.stopped())) return outcome::cut;
      const auto where = pending_.back();
      pending_.pop_back();
      if (depth_ == frames_.size()) frames_.emplace_back();
      auto& f = frames_[depth_++];
      f.where = where;
      f.before = now();
      if (!select(f)) f.branches.clear(), f.may_raise = false;
      f.next = 0;
      auto at = depth_ - 1;
      while (!advance(at)) {  // the component has no layout: neither have the siblings that were solved before it
        at = frames_[at].where.parent;
        if (at == root) return outcome::exhausted;
        depth_ = at + 1;
      }
    }
    return outcome::found;
  }

  mark now() const { return {item_trail_.size(), summary_trail_.size(), placed_.size(), pending_.size()}; }

  void undo(const mark& to) {
    for (; placed_.size() > to.placed; placed_.pop_back()) {
      const auto k = placed_.back();
      const auto& x = p_.items[k];
      items_[k].placed = false;
      for (auto c = x.first; c <= x.last; ++c) {
        ++cliques_[c].count;
        cliques_[c].remains += x.size;
        crossing_[c] += c < x.last;
      }
    }
    for (; item_trail_.size() > to.items; item_trail_.pop_back()) items_[item_trail_.back().first] = item_trail_.back().second;
    for (; summary_trail_.size() > to.summaries; summary_trail_.pop_back())
      static_cast<summary&>(cliques_[summary_trail_.back().first]) = summary_trail_.back().second;
    pending_.resize(to.pending);
  }

  /// Takes the next branch of a frame that is not refuted at once. @return false if there is none
  bool advance(std::size_t at) {
    auto& f = frames_[at];
    undo(f.before);
    while (f.next < f.branches.size()) {
      const auto k = f.branches[f.next++];
      if (place(k)) {
        split(f.where.first, f.where.last, at);
        return true;
      }
      undo(f.before);
    }
    if (!f.may_raise) return false;
    f.may_raise = false;
    if (raise(f.clique)) {
      pending_.push_back({f.where.first, f.where.last, at});
      return true;
    }
    undo(f.before);
    return false;
  }

  /// Adds the components of a range of cliques; the smallest will be solved first.
  void split(index_t first, index_t last, std::size_t parent) {
    const auto begin = pending_.size();
    for (auto c = first; c <= last; ++c) {
      if (cliques_[c].count == 0) continue;
      auto end = c;
      while (crossing_[end] > 0) ++end;
      pending_.push_back({c, end, parent});
      c = end;
    }
    const auto longer = [](const component& a, const component& b) { return a.last - a.first > b.last - b.first; };
    std::stable_sort(pending_.begin() + static_cast<std::ptrdiff_t>(begin), pending_.end(), longer);
  }

  bool place(index_t k) {
    const auto& x = p_.items[k];
    const auto top = items_[k].lowest + x.size;
    items_[k].placed = true;
    placed_.push_back(k);
    begin_changes();
    for (auto c = x.first; c <= x.last; ++c) {
      auto& q = cliques_[c];
      const auto end = q.unplaced.begin() + static_cast<std::ptrdiff_t>(q.count--);
      const auto here = std::find(q.unplaced.begin(), end, k);
      std::rotate(here, here + 1, end);
      q.remains -= x.size;
      crossing_[c] -= c < x.last;
      work_ += q.count;
      change(c);
    }
    for (auto other : p_.neighbours[k]) {
      const auto& o = items_[other];
      if (o.placed || o.lowest > top || (o.lowest == top && o.supported)) continue;
      if (o.lowest < top) changed(other);
      set(other, top, true);
    }
    return update_changed();
  }

  /// No item lies at the floor of the clique: those that could lie on a neighbour that is still to be placed.
  bool raise(index_t clique) {
    begin_changes();
    const auto& q = cliques_[clique];
    const auto floor = q.floor;
    raised_.clear();
    for (std::size_t i = 0; i < q.count; ++i)
      if (items_[q.unplaced[i]].lowest == floor) raised_.emplace_back(q.unplaced[i], lowest_support(q.unplaced[i]));
    for (const auto& [k, to] : raised_) {
      if (to == never) return false;
      set(k, to, false);
      changed(k);
    }
    return update_changed();
  }

  void set(index_t k, bytes_t lowest, bool supported) {
    item_trail_.emplace_back(k, items_[k]);
    items_[k].lowest = lowest;
    items_[k].supported = supported;
  }

  void begin_changes() {
    ++stamp_;
    changed_.clear();
  }
  void change(index_t clique) {
    if (stamps_[clique] == stamp_) return;
    stamps_[clique] = stamp_;
    changed_.push_back(clique);
  }
  void changed(index_t k) {
    for (auto c = p_.items[k].first; c <= p_.items[k].last; ++c) change(c);
  }
  bool update_changed() {
    for (auto c : changed_)
      if (!update(c)) {
        weights_[c] += 1;
        return false;
      }
    return true;
  }

  /// Summarizes a clique. @return false if its unplaced items cannot be stacked within the capacity
  bool update(index_t clique) {
    auto& q = cliques_[clique];
    summary_trail_.emplace_back(clique, q);
    static_cast<summary&>(q) = {};
    bytes_t highest = 0;
    for (std::size_t i = 0; i < q.count; ++i) {
      const auto k = q.unplaced[i];
      const auto lowest = items_[k].lowest, top = lowest + p_.items[k].size;
      q.floor = std::min(q.floor, lowest);
      highest = std::max(highest, lowest);
      if (top < q.lowest_top) {
        q.second_top = q.lowest_top;
        q.lowest_top = top;
        q.lowest = k;
      } else {
        q.second_top = std::min(q.second_top, top);
      }
    }
    work_ += q.count;
    if (q.count == 0) return true;
    if (q.floor + q.remains > capacity_) return false;
    if (highest + q.remains <= capacity_) return true;
    return stacks(q, highest);
  }

  /// The order is kept from time to time, so that insertion sort is almost linear.
  bool stacks(clique_state& q, bytes_t highest) {
    auto& list = q.unplaced;
    for (std::size_t i = 1; i < q.count; ++i) {
      const auto k = list[i];
      auto j = i;
      for (; j > 0 && items_[list[j - 1]].lowest > items_[k].lowest; --j) list[j] = list[j - 1];
      list[j] = k;
    }
    bytes_t end = 0, rest = q.remains;
    for (std::size_t i = 0; i < q.count && end < highest && end + rest <= capacity_; ++i) {
      end = std::max(end, items_[list[i]].lowest) + p_.items[list[i]].size;
      rest -= p_.items[list[i]].size;
    }
    return end + rest <= capacity_;
  }

  /// The least offset at which an unplaced neighbour could end.
  bytes_t lowest_support(index_t k) const {
    auto least = never;
    for (auto c = p_.items[k].first; c <= p_.items[k].last; ++c)
      least = std::min(least, cliques_[c].lowest == k ? cliques_[c].second_top : cliques_[c].lowest_top);
    return least;
  }

  /// Chooses the clique of a frame and lists its branches. @return false if a clique has none
  bool select(frame& f) {
    supports_.assign(items_.size(), -1);
    auto best = std::numeric_limits<double>::infinity();
    for (auto c = f.where.first; c <= f.where.last; ++c) {
      const auto& q = cliques_[c];
      if (q.count == 0) continue;
      std::size_t branches = 0;
      auto raised = never;
      bool complete = true;
      for (std::size_t i = 0; i < q.count && complete; ++i) {
        const auto k = q.unplaced[i];
        if (items_[k].lowest > q.floor) {
          raised = std::min(raised, items_[k].lowest);
          continue;
        }
        if (supports_[k] < 0) supports_[k] = lowest_support(k);
        complete = supports_[k] > q.floor;
        branches += items_[k].supported;
        raised = std::min(raised, supports_[k]);
      }
      work_ += q.count;
      if (!complete) continue;
      const bool may_raise = raised != never && raised + q.remains <= capacity_;
      branches += may_raise;
      if (branches == 0) {
        weights_[c] += 1;
        return false;
      }
      const auto s = branches == 1 ? -1.0 : score(c, static_cast<double>(branches));
      if (s >= best) continue;
      best = s;
      f.clique = c;
      f.may_raise = may_raise;
      if (branches == 1) break;
    }
    list_branches(f);
    return true;
  }

  double score(index_t c, double branches) const {
    const auto floor = static_cast<double>(cliques_[c].floor) / static_cast<double>(capacity_);
    switch (strategy_->clique) {
      case packing_strategy::rule::lowest_floor:
        return floor + 1e-3 * branches;
      case packing_strategy::rule::weighted_floor:
        return (floor + 0.05 * branches) / (1 + weights_[c]);
      default:
        return 10 * floor + branches;
    }
  }

  void list_branches(frame& f) {
    const auto& q = cliques_[f.clique];
    f.branches.clear();
    for (std::size_t i = 0; i < q.count; ++i) {
      const auto k = q.unplaced[i];
      if (items_[k].lowest == q.floor && items_[k].supported && !unsorted(k)) f.branches.push_back(k);
    }
    std::sort(f.branches.begin(), f.branches.end(), [&](index_t a, index_t b) { return ranks_[a] < ranks_[b]; });
    const auto same = [&](index_t a, index_t b) { return same_lifetime(a, b) && p_.items[a].size == p_.items[b].size; };
    for (std::size_t i = 0; i < f.branches.size(); ++i) {
      const auto later = f.branches.begin() + static_cast<std::ptrdiff_t>(i) + 1;
      f.branches.erase(std::remove_if(later, f.branches.end(), [&](index_t k) { return same(f.branches[i], k); }),
                       f.branches.end());
    }
  }

  bool same_lifetime(index_t a, index_t b) const {
    return p_.items[a].first == p_.items[b].first && p_.items[a].last == p_.items[b].last;
  }

  /// Would the item lie on one of the same lifetime that should lie on it?
  bool unsorted(index_t k) const {
    if (!strategy_->sorted_twins) return false;
    const auto& q = cliques_[p_.items[k].first];
    for (auto i = q.count; i < q.unplaced.size(); ++i) {
      const auto below = q.unplaced[i];
      if (same_lifetime(k, below) && items_[below].lowest + p_.items[below].size == items_[k].lowest && ranks_[below] > ranks_[k])
        return true;
    }
    return false;
  }

  const packing_problem& p_;
  const packing_strategy* strategy_ = nullptr;
  bytes_t capacity_ = 0;
  std::vector<item_state> items_;
  std::vector<clique_state> cliques_;
  std::vector<bytes_t> loads_;
  std::vector<double> weights_;    ///< per clique: failures, the older ones less
  std::vector<index_t> crossing_;  ///< per clique: unplaced items that it shares with the next
  std::vector<index_t> ranks_;     ///< per item: place in the order of the strategy

  std::vector<frame> frames_;
  std::size_t depth_ = 0;
  std::vector<component> pending_;
  std::vector<std::pair<index_t, item_state>> item_trail_;
  std::vector<std::pair<index_t, summary>> summary_trail_;
  std::vector<index_t> placed_;

  std::vector<index_t> changed_;  ///< cliques
  std::vector<std::size_t> stamps_;
  std::size_t stamp_ = 0;
  std::vector<std::pair<index_t, bytes_t>> raised_;
  std::vector<bytes_t> supports_;
  std::size_t work_ = 0;
};

}  // namespace remat::detail
