// SPDX-License-Identifier: Apache-2.0
/// @file
/// A layout under construction: offsets of the placed items, lower bounds for the others, and undo.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include <remat/layout/cliques.hpp>

namespace remat::detail {

/// A partial layout. Placed items have offsets, all other items have lowest offsets. Every step can be undone.
/// Complexity: `place` and `raise` cost O(cliques changed, times their items). Undoing a step costs as much.
class partial_packing {
 public:
  static constexpr bytes_t never = std::numeric_limits<bytes_t>::max();

  struct item_state {
    bytes_t lowest = 0;     ///< offset of a placed item; lower bound on the offset of an unplaced item
    bool supported = true;  ///< the item could lie at `lowest`: at 0, or on the top of a placed neighbour
    bool placed = false;
  };
  /// State of a clique that a node reads.
  struct summary {
    bytes_t floor = never;                           ///< least lowest offset of the unplaced items
    bytes_t lowest_top = never, second_top = never;  ///< the two least ends of unplaced items at their lowest offsets
    index_t lowest = none;                           ///< the item of `lowest_top`
  };
  struct clique_state : summary {
    std::vector<index_t> unplaced;  ///< first `count`: unplaced items, roughly by lowest offset; then placed items, latest first
    std::size_t count = 0;
    bytes_t load = 0;            ///< sum of the sizes of all items
    bytes_t remaining_size = 0;  ///< sum of the sizes of unplaced items
  };
  /// Sizes of the trails, for `undo`.
  struct mark {
    std::size_t items, summaries, placed;
  };

  /// @param p the problem; must outlive this object
  explicit partial_packing(const packing_problem& p) : p_(p), items_(p.items.size()), cliques_(p.cliques.size()) {
    for (index_t c = 0; c < cliques_.size(); ++c)
      for (auto k : p.cliques[c]) cliques_[c].load += p.items[k].size;
    weights_.assign(cliques_.size(), 0);
    stamps_.assign(cliques_.size(), 0);
  }

  /// Starts anew with no item placed.
  /// @param capacity units
  /// @return false if more units are live at one time
  bool reset(bytes_t capacity) {
    capacity_ = capacity;
    std::fill(items_.begin(), items_.end(), item_state{});
    crossing_.assign(cliques_.size(), 0);
    for (index_t c = 0; c < cliques_.size(); ++c) {
      auto& q = cliques_[c];
      q.unplaced = p_.cliques[c];
      q.count = q.unplaced.size();
      q.remaining_size = q.load;
      for (auto k : q.unplaced) crossing_[c] += p_.items[k].last > c;
    }
    placed_.clear();
    item_trail_.clear();
    bool fits = true;
    for (index_t c = 0; c < cliques_.size(); ++c) fits = update(c) && fits;
    summary_trail_.clear();
    for (auto& w : weights_) w *= 0.9;
    work_ = 0;
    return fits;
  }

  const packing_problem& problem() const { return p_; }
  const std::vector<item_state>& items() const { return items_; }
  const std::vector<clique_state>& cliques() const { return cliques_; }
  bytes_t capacity() const { return capacity_; }
  /// Number of unplaced items that a clique shares with the next clique.
  index_t crossing(index_t clique) const { return crossing_[clique]; }
  /// Failures of a clique in this run; failures in earlier runs count less.
  double weight(index_t clique) const { return weights_[clique]; }
  void blame(index_t clique) { weights_[clique] += 1; }
  /// Items visited since `reset`.
  std::size_t work() const { return work_; }
  void count_work(std::size_t items) { work_ += items; }

  /// Cliques that the latest step changed; some may be missing.
  const std::vector<index_t>& changed() const { return changed_; }

  mark current_mark() const { return {item_trail_.size(), summary_trail_.size(), placed_.size()}; }

  void undo(const mark& to) {
    for (; placed_.size() > to.placed; placed_.pop_back()) {
      const auto k = placed_.back();
      const auto& x = p_.items[k];
      items_[k].placed = false;
      for (auto c = x.first; c <= x.last; ++c) {
        ++cliques_[c].count;
        cliques_[c].remaining_size += x.size;
        crossing_[c] += c < x.last;
      }
    }
    for (; item_trail_.size() > to.items; item_trail_.pop_back()) items_[item_trail_.back().first] = item_trail_.back().second;
    for (; summary_trail_.size() > to.summaries; summary_trail_.pop_back())
      static_cast<summary&>(cliques_[summary_trail_.back().first]) = summary_trail_.back().second;
  }

  /// Places an item at its lowest offset. Its unplaced neighbours then lie above it.
  /// @return false if the unplaced items cannot fit
  bool place(index_t k) {
    const auto& x = p_.items[k];
    const auto top = items_[k].lowest + x.size;
    items_[k].placed = true;
    placed_.push_back(k);
    begin_changes();
    for (auto c = x.first; c <= x.last; ++c) {
      auto& q = cliques_[c];
      const auto end = q.unplaced.begin() + static_cast<std::ptrdiff_t>(q.count--);
      const auto position = std::find(q.unplaced.begin(), end, k);
      std::rotate(position, position + 1, end);
      q.remaining_size -= x.size;
      crossing_[c] -= c < x.last;
      work_ += q.count;
      mark_changed(c);
    }
    for (auto other : p_.neighbours[k]) {
      const auto& o = items_[other];
      if (o.placed || o.lowest > top || (o.lowest == top && o.supported)) continue;
      if (o.lowest < top) mark_cliques_changed(other);
      set_item(other, top, true);
    }
    return update_changed();
  }

  /// Decides that no item lies at the floor of the clique: each of these items lies on a neighbour that is still unplaced.
  /// @return false if this is impossible
  bool raise(index_t clique) {
    begin_changes();
    const auto& q = cliques_[clique];
    const auto floor = q.floor;
    raised_.clear();
    for (std::size_t i = 0; i < q.count; ++i)
      if (items_[q.unplaced[i]].lowest == floor) raised_.emplace_back(q.unplaced[i], lowest_support(q.unplaced[i]));
    for (const auto& [k, to] : raised_) {
      if (to == never) return false;
      set_item(k, to, false);
      mark_cliques_changed(k);
    }
    return update_changed();
  }

  /// The least offset at which an unplaced neighbour of item k could end.
  bytes_t lowest_support(index_t k) const {
    auto least = never;
    for (auto c = p_.items[k].first; c <= p_.items[k].last; ++c)
      least = std::min(least, cliques_[c].lowest == k ? cliques_[c].second_top : cliques_[c].lowest_top);
    return least;
  }

  bool same_lifetime(index_t a, index_t b) const {
    return p_.items[a].first == p_.items[b].first && p_.items[a].last == p_.items[b].last;
  }

 private:
  void set_item(index_t k, bytes_t lowest, bool supported) {
    item_trail_.emplace_back(k, items_[k]);
    items_[k].lowest = lowest;
    items_[k].supported = supported;
  }

  void begin_changes() {
    ++stamp_;
    changed_.clear();
  }
  void mark_changed(index_t clique) {
    if (stamps_[clique] == stamp_) return;
    stamps_[clique] = stamp_;
    changed_.push_back(clique);
  }
  void mark_cliques_changed(index_t k) {
    for (auto c = p_.items[k].first; c <= p_.items[k].last; ++c) mark_changed(c);
  }
  bool update_changed() {
    for (auto c : changed_)
      if (!update(c)) {
        blame(c);
        return false;
      }
    return true;
  }

  /// Updates the summary of a clique. @return false if its unplaced items cannot be stacked within the capacity
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
    if (q.floor + q.remaining_size > capacity_) return false;
    if (highest + q.remaining_size <= capacity_) return true;
    return fits_stacked(q, highest);
  }

  /// True if the unplaced items, stacked from their lowest offsets, end within the capacity. The list stays almost sorted
  /// between calls, so insertion sort takes almost linear time.
  bool fits_stacked(clique_state& q, bytes_t highest) {
    auto& list = q.unplaced;
    for (std::size_t i = 1; i < q.count; ++i) {
      const auto k = list[i];
      auto j = i;
      for (; j > 0 && items_[list[j - 1]].lowest > items_[k].lowest; --j) list[j] = list[j - 1];
      list[j] = k;
    }
    bytes_t end = 0, remaining_size = q.remaining_size;
    for (std::size_t i = 0; i < q.count && end < highest && end + remaining_size <= capacity_; ++i) {
      end = std::max(end, items_[list[i]].lowest) + p_.items[list[i]].size;
      remaining_size -= p_.items[list[i]].size;
    }
    return end + remaining_size <= capacity_;
  }

  const packing_problem& p_;
  bytes_t capacity_ = 0;
  std::vector<item_state> items_;
  std::vector<clique_state> cliques_;
  std::vector<index_t> crossing_;  ///< per clique
  std::vector<double> weights_;    ///< per clique
  std::size_t work_ = 0;

  std::vector<std::pair<index_t, item_state>> item_trail_;
  std::vector<std::pair<index_t, summary>> summary_trail_;
  std::vector<index_t> placed_;

  std::vector<index_t> changed_;  ///< cliques
  std::vector<std::size_t> stamps_;
  std::size_t stamp_ = 0;
  std::vector<std::pair<index_t, bytes_t>> raised_;
};

}  // namespace remat::detail
