// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tree search for a layout within a capacity: at each node, who lies at the floor of a clique?
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <remat/core/monitor.hpp>
#include <remat/layout/partial_packing.hpp>

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
/// Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023. There a node branches on all items
/// that could lie next above the whole layout, in a fixed order of offsets; here on those at the floor of one clique.
/// Complexity: exponential in the items; `nodes` and `most_work` limit a run. A node costs O(cliques it changes, times their
/// items).
class packing_search {
 public:
  enum class outcome { found, exhausted, cut };

  /// @param p must outlive the search
  explicit packing_search(const packing_problem& p) : state_(p), ranks_(p.items.size()) {}

  /// One run from the start. What failed in earlier runs guides it.
  /// @param capacity  units
  /// @param nodes     at which the run is cut
  /// @param most_work items looked at, at which it is cut as well
  /// @return exhausted: no layout fits
  outcome run(const packing_strategy& s, bytes_t capacity, std::size_t nodes, std::size_t most_work, const monitor& m) {
    strategy_ = &s;
    rank(s.keys);
    pending_.clear();
    depth_ = 0;
    if (!state_.reset(capacity)) return outcome::exhausted;
    if (!state_.cliques().empty()) split(0, static_cast<index_t>(state_.cliques().size() - 1), root);
    for (std::size_t n = 0; !pending_.empty(); ++n) {
      if (n >= nodes || state_.work() >= most_work || (n % 64 == 0 && m.stopped())) return outcome::cut;
      const auto where = pending_.back();
      pending_.pop_back();
      if (depth_ == frames_.size()) frames_.emplace_back();
      auto& f = frames_[depth_++];
      f = {where, 0, std::move(f.branches), 0, false, state_.now(), pending_.size()};
      f.branches.clear();
      select(f);
      auto at = depth_ - 1;
      while (!advance(at)) {  // the component has no layout: neither have the siblings that were solved before it
        at = frames_[at].where.parent;
        if (at == root) return outcome::exhausted;
        depth_ = at + 1;
      }
    }
    return outcome::found;
  }

  /// Of the latest run, which must have found a layout. @param k an item
  bytes_t offset(index_t k) const { return state_.items()[k].lowest; }
  /// Items that the latest run has looked at.
  std::size_t work() const { return state_.work(); }
  const partial_packing& state() const { return state_; }

 private:
  static constexpr bytes_t never = partial_packing::never;
  /// Cliques first..last, some of whose items are unplaced, and none of which reaches beyond.
  struct component {
    index_t first, last;
    std::size_t parent;  ///< the frame whose branch made it; `root` for none
  };
  static constexpr std::size_t root = std::numeric_limits<std::size_t>::max();
  struct frame {
    component where{};
    index_t clique = 0;
    std::vector<index_t> branches;  ///< items that may lie at the floor
    std::size_t next = 0;
    bool may_raise = false;  ///< a last branch: none of them lies there
    partial_packing::mark before{};
    std::size_t pending = 0;  ///< components that wait
  };

  void rank(const std::vector<double>& keys) {
    std::vector<index_t> order(ranks_.size());
    std::iota(order.begin(), order.end(), index_t{0});
    std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) { return keys[a] > keys[b]; });
    for (index_t r = 0; r < order.size(); ++r) ranks_[order[r]] = r;
  }

  void undo(const frame& f) {
    state_.undo(f.before);
    pending_.resize(f.pending);
  }

  /// Takes the next branch of a frame that is not refuted at once. @return false if there is none
  bool advance(std::size_t at) {
    auto& f = frames_[at];
    undo(f);
    while (f.next < f.branches.size()) {
      const auto k = f.branches[f.next++];
      if (state_.place(k)) {
        split(f.where.first, f.where.last, at);
        return true;
      }
      undo(f);
    }
    if (!f.may_raise) return false;
    f.may_raise = false;
    if (state_.raise(f.clique)) {
      pending_.push_back({f.where.first, f.where.last, at});
      return true;
    }
    undo(f);
    return false;
  }

  /// Adds the components of a range of cliques; the smallest will be solved first.
  void split(index_t first, index_t last, std::size_t parent) {
    const auto begin = pending_.size();
    for (auto c = first; c <= last; ++c) {
      if (state_.cliques()[c].count == 0) continue;
      auto end = c;
      while (state_.crossing(end) > 0) ++end;
      pending_.push_back({c, end, parent});
      c = end;
    }
    const auto longer = [](const component& a, const component& b) { return a.last - a.first > b.last - b.first; };
    std::stable_sort(pending_.begin() + static_cast<std::ptrdiff_t>(begin), pending_.end(), longer);
  }

  /// How a clique could be branched on.
  struct choice {
    std::size_t branches = 0;
    bool may_raise = false;
    bool complete = true;  ///< the branches leave nothing out
  };

  choice branches_of(index_t clique) {
    const auto& q = state_.cliques()[clique];
    choice out;
    auto raised = never;
    for (std::size_t i = 0; i < q.count; ++i) {
      const auto k = q.unplaced[i];
      const auto& x = state_.items()[k];
      auto next = x.lowest;
      if (x.lowest == q.floor) {
        if (supports_[k] < 0) supports_[k] = state_.lowest_support(k);
        next = supports_[k];
        if (next <= q.floor) return {0, false, false};
        out.branches += x.supported;
      }
      raised = std::min(raised, next);
    }
    state_.count_work(q.count);
    out.may_raise = raised != never && raised + q.remains <= state_.capacity();
    out.branches += out.may_raise;
    return out;
  }

  /// Chooses the clique of a frame. Cliques that the last step changed come first: if one of them leaves no choice, the others
  /// need not be looked at. Without a branch, the component has no layout.
  void select(frame& f) {
    supports_.assign(ranks_.size(), -1);
    auto best = std::numeric_limits<double>::infinity();
    const auto decides = [&](index_t c) {
      if (c < f.where.first || c > f.where.last || state_.cliques()[c].count == 0) return false;
      const auto now = branches_of(c);
      if (!now.complete) return false;
      const auto s = now.branches <= 1 ? -1.0 : score(c, static_cast<double>(now.branches));
      if (s < best) {
        best = s;
        f.clique = c;
        f.may_raise = now.may_raise;
      }
      if (now.branches == 0) state_.blame(c);
      return now.branches <= 1;
    };
    bool decided = std::any_of(state_.changed().begin(), state_.changed().end(), decides);
    for (auto c = f.where.first; c <= f.where.last && !decided; ++c) decided = decides(c);
    list_branches(f);
  }

  double score(index_t c, double branches) const {
    const auto floor = static_cast<double>(state_.cliques()[c].floor) / static_cast<double>(state_.capacity());
    switch (strategy_->clique) {
      case packing_strategy::rule::lowest_floor:
        return floor + 1e-3 * branches;
      case packing_strategy::rule::weighted_floor:
        return (floor + 0.05 * branches) / (1 + state_.weight(c));
      default:
        return 10 * floor + branches;
    }
  }

  void list_branches(frame& f) {
    const auto& q = state_.cliques()[f.clique];
    for (std::size_t i = 0; i < q.count; ++i) {
      const auto k = q.unplaced[i];
      if (state_.items()[k].lowest == q.floor && state_.items()[k].supported && !unsorted(k)) f.branches.push_back(k);
    }
    std::sort(f.branches.begin(), f.branches.end(), [&](index_t a, index_t b) { return ranks_[a] < ranks_[b]; });
    const auto same = [&](index_t a, index_t b) {
      return state_.same_lifetime(a, b) && state_.problem().items[a].size == state_.problem().items[b].size;
    };
    for (std::size_t i = 0; i < f.branches.size(); ++i) {
      const auto later = f.branches.begin() + static_cast<std::ptrdiff_t>(i) + 1;
      f.branches.erase(std::remove_if(later, f.branches.end(), [&](index_t k) { return same(f.branches[i], k); }),
                       f.branches.end());
    }
  }

  /// Would the item lie on one of the same lifetime that should lie on it?
  bool unsorted(index_t k) const {
    if (!strategy_->sorted_twins) return false;
    const auto& q = state_.cliques()[state_.problem().items[k].first];
    for (auto i = q.count; i < q.unplaced.size(); ++i) {
      const auto below = q.unplaced[i];
      if (state_.same_lifetime(k, below) &&
          state_.items()[below].lowest + state_.problem().items[below].size == state_.items()[k].lowest &&
          ranks_[below] > ranks_[k])
        return true;
    }
    return false;
  }

  partial_packing state_;
  const packing_strategy* strategy_ = nullptr;
  std::vector<index_t> ranks_;  ///< per item: place in the order of the strategy
  std::vector<frame> frames_;
  std::size_t depth_ = 0;
  std::vector<component> pending_;
  std::vector<bytes_t> supports_;  ///< per item: `lowest_support`, or -1 where it was not asked for
};

}  // namespace remat::detail
