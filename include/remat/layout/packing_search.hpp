// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tree search for a layout within a capacity. Each node decides which item lies at the floor of a clique.
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

/// Strategy of one run of the search. The search is complete with every strategy.
struct packing_strategy {
  enum class rule { lowest_floor, weighted_floor, few_branches };
  rule clique = rule::lowest_floor;  ///< rule that selects the clique to branch on
  std::vector<double> keys;          ///< per item; items with the largest key are tried first
  bool sorted_twins = false;         ///< of adjacent items with equal live ranges, the item with the larger key must lie below
};

/// Searches for offsets below a capacity.
///
/// The search builds layouts from the bottom. It considers *bottom-justified* layouts only: each item lies at 0 or on the top of
/// a neighbour. Every layout that fits can be pushed down to a bottom-justified layout. Each item has a lowest offset, which
/// rises as its neighbours are placed. The floor of a clique is the least of the lowest offsets of its unplaced items.
///
/// A node selects a clique. It branches on the item that lies at the floor of the clique, or on no item lying there. These
/// branches exclude each other. They are complete if no neighbour of the items at the floor fits below the floor. This holds at
/// least for the clique with the lowest floor.
///
/// Pruning:
/// - The unplaced items of a clique, stacked from their lowest offsets, must end below the capacity.
/// - If an item does not lie at the floor, it lies on an unplaced neighbour, which raises its lowest offset.
/// - Cliques without a common unplaced item are separate components. If a component has no layout, no sibling is tried again.
/// - Of equal items, only one is tried.
///
/// Dominance, decomposition in time, and portfolios of orders are those of M. D. Moffitt, "MiniMalloc: A Lightweight Memory
/// Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023. A node of MiniMalloc branches on all items that could lie
/// next above the whole layout, in a fixed order of offsets. A node here branches on the items at the floor of one clique.
/// Complexity: exponential in the items; `nodes` and `max_work` limit a run. A node costs O(cliques it changes, times their
/// items).
class packing_search {
 public:
  enum class outcome { found, exhausted, cut };

  /// @param p the problem; must outlive the search
  explicit packing_search(const packing_problem& p) : state_(p), ranks_(p.items.size()) {}

  /// Runs the search once from the start. The failures of earlier runs guide it.
  /// @param s        strategy
  /// @param capacity units
  /// @param nodes    limit on the nodes of the run
  /// @param max_work limit on the items that the run visits
  /// @param m        time limit and request to stop
  /// @return found; exhausted: no layout fits; cut: a limit was reached
  outcome run(const packing_strategy& s, bytes_t capacity, std::size_t nodes, std::size_t max_work, const monitor& m) {
    strategy_ = &s;
    set_ranks(s.keys);
    pending_.clear();
    depth_ = 0;
    if (!state_.reset(capacity)) return outcome::exhausted;
    if (!state_.cliques().empty()) split(0, static_cast<index_t>(state_.cliques().size() - 1), root);
    for (std::size_t n = 0; !pending_.empty(); ++n) {
      if (n >= nodes || state_.work() >= max_work || (n % 64 == 0 && m.stopped())) return outcome::cut;
      const auto part = pending_.back();
      pending_.pop_back();
      if (depth_ == frames_.size()) frames_.emplace_back();
      auto& f = frames_[depth_++];
      f = {part, 0, std::move(f.branches), 0, false, state_.current_mark(), pending_.size()};
      f.branches.clear();
      select_clique(f);
      auto at = depth_ - 1;
      while (!advance(at)) {  // the component has no layout, so its siblings need not be tried again
        at = frames_[at].part.parent;
        if (at == root) return outcome::exhausted;
        depth_ = at + 1;
      }
    }
    return outcome::found;
  }

  /// Offset of item k in the layout that the latest run has found, units.
  bytes_t offset(index_t k) const { return state_.items()[k].lowest; }
  /// Items that the latest run has visited.
  std::size_t work() const { return state_.work(); }
  const partial_packing& state() const { return state_; }

 private:
  static constexpr bytes_t never = partial_packing::never;
  /// Cliques first to last. Some of their items are unplaced, and no unplaced item reaches beyond these cliques.
  struct component {
    index_t first, last;
    std::size_t parent;  ///< frame whose branch made the component; `root` for none
  };
  static constexpr std::size_t root = std::numeric_limits<std::size_t>::max();
  struct frame {
    component part{};
    index_t clique = 0;
    std::vector<index_t> branches;  ///< items that may lie at the floor
    std::size_t next = 0;
    bool may_raise = false;  ///< a last branch remains: no item lies at the floor
    partial_packing::mark before{};
    std::size_t pending = 0;  ///< number of components that waited when the frame began
  };

  void set_ranks(const std::vector<double>& keys) {
    std::vector<index_t> order(ranks_.size());
    std::iota(order.begin(), order.end(), index_t{0});
    std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) { return keys[a] > keys[b]; });
    for (index_t r = 0; r < order.size(); ++r) ranks_[order[r]] = r;
  }

  void undo(const frame& f) {
    state_.undo(f.before);
    pending_.resize(f.pending);
  }

  /// Takes the next branch of a frame that no pruning rule refutes. @return false if there is none
  bool advance(std::size_t frame_index) {
    auto& f = frames_[frame_index];
    undo(f);
    while (f.next < f.branches.size()) {
      const auto k = f.branches[f.next++];
      if (state_.place(k)) {
        split(f.part.first, f.part.last, frame_index);
        return true;
      }
      undo(f);
    }
    if (!f.may_raise) return false;
    f.may_raise = false;
    if (state_.raise(f.clique)) {
      pending_.push_back({f.part.first, f.part.last, frame_index});
      return true;
    }
    undo(f);
    return false;
  }

  /// Adds the components of a range of cliques. The smallest one is solved first.
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

  /// Branches of a clique.
  struct choice {
    std::size_t branches = 0;
    bool may_raise = false;
    bool complete = true;  ///< the branches cover all layouts
  };

  choice branches_of(index_t clique) {
    const auto& q = state_.cliques()[clique];
    choice out;
    auto raised = never;
    for (std::size_t i = 0; i < q.count; ++i) {
      const auto k = q.unplaced[i];
      const auto& x = state_.items()[k];
      auto next_offset = x.lowest;
      if (x.lowest == q.floor) {
        if (supports_[k] < 0) supports_[k] = state_.lowest_support(k);
        next_offset = supports_[k];
        if (next_offset <= q.floor) return {0, false, false};
        out.branches += x.supported;
      }
      raised = std::min(raised, next_offset);
    }
    state_.count_work(q.count);
    out.may_raise = raised != never && raised + q.remaining_size <= state_.capacity();
    out.branches += out.may_raise;
    return out;
  }

  /// Chooses the clique of a frame. Cliques that the last step changed come first, because one of them may leave no choice. A
  /// clique without branches proves that the component has no layout.
  void select_clique(frame& f) {
    supports_.assign(ranks_.size(), -1);
    auto best = std::numeric_limits<double>::infinity();
    const auto leaves_no_choice = [&](index_t c) {
      if (c < f.part.first || c > f.part.last || state_.cliques()[c].count == 0) return false;
      const auto options = branches_of(c);
      if (!options.complete) return false;
      const auto s = options.branches <= 1 ? -1.0 : score(c, static_cast<double>(options.branches));
      if (s < best) {
        best = s;
        f.clique = c;
        f.may_raise = options.may_raise;
      }
      if (options.branches == 0) state_.blame(c);
      return options.branches <= 1;
    };
    bool decided = std::any_of(state_.changed().begin(), state_.changed().end(), leaves_no_choice);
    for (auto c = f.part.first; c <= f.part.last && !decided; ++c) decided = leaves_no_choice(c);
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
      if (state_.items()[k].lowest == q.floor && state_.items()[k].supported && !breaks_twin_order(k)) f.branches.push_back(k);
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

  /// True if item k would lie on an item of the same live range although it should lie below.
  bool breaks_twin_order(index_t k) const {
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
  std::vector<index_t> ranks_;  ///< per item: place in the order of keys
  std::vector<frame> frames_;
  std::size_t depth_ = 0;
  std::vector<component> pending_;
  std::vector<bytes_t> supports_;  ///< per item: `lowest_support`; -1 if not computed yet
};

}  // namespace remat::detail
