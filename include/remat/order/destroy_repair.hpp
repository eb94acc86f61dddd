// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ruin and recreate on orders of computations: recomputations are taken out of an order, and values are dropped and computed
/// again elsewhere until it fits the budget. What `local_search` repeats.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// An order of computations under change. Any order in which every operation comes after the first computation of its operands is
/// valid: what is not computed again is retained. Only the memory it needs is to be brought below the budget.
///
/// Equal seeds and calls give equal orders. The object keeps its buffers between calls; one per thread.
/// @code
/// remat::destroy_repair n(p, budget, 1);
/// n.load(remat::needed_operations(p));
/// if (n.repair()) std::cout << n.seconds() << " s within the budget\n";
/// @endcode
class destroy_repair {
 public:
  /// @param p      the problem; must outlive this
  /// @param budget bytes
  /// @param seed   of every random choice
  destroy_repair(const problem& p, bytes_t budget, std::uint64_t seed)
      : p_(p), budget_(budget), random_(seed), first_(p.values().size() + 1), made_(p.operations().size(), 0) {
    mark_.assign(p.operations().size(), 0);
    noise_.assign(p.values().size(), 1);
    wanted_.assign(p.values().size(), 0);
    kept_.assign(p.values().size(), 0);
    counted_.assign(p.values().size(), 0);
    looked_.assign(p.values().size(), 0);
    missing_.assign(p.values().size(), 0);
    excess_.assign(p.values().size(), 0);
    estimate_.assign(p.operations().size(), 0);
  }

  const std::vector<operation_id>& order() const { return order_; }
  double seconds() const {
    double sum = 0;
    for (auto o : order_) sum += p_.operations()[o].seconds;
    return sum;
  }
  /// Starts from a valid order. Complexity: O(values + edges executed).
  void load(std::vector<operation_id> order) {
    order_ = std::move(order);
    measure();
  }
  /// Bytes needed, if every value is dropped as early as possible.
  bytes_t peak() const { return peak_; }
  bool fits() const { return peak_ <= budget_; }

  /// Takes out some recomputations: those in a window, those of related operations or a few anywhere.
  void ruin() {
    std::vector<std::size_t> again;
    std::fill(made_.begin(), made_.end(), 0);
    for (std::size_t k = 0; k < order_.size(); ++k)
      if (made_[order_[k]]++ > 0) again.push_back(k);
    std::vector<bool> removed(order_.size(), false);
    if (!again.empty()) {
      const auto pick = [&](std::size_t n) { return static_cast<std::size_t>(random_() % n); };
      const auto count = 1 + pick(std::min<std::size_t>(again.size(), std::size_t{1} << pick(8)));
      const auto from = pick(again.size());
      switch (pick(3)) {
        case 0:  // neighbours in the order
          for (std::size_t i = 0; i < count; ++i) removed[again[(from + i) % again.size()]] = true;
          break;
        case 1: {  // neighbours in the problem
          const auto centre = static_cast<std::int64_t>(order_[again[from]]);
          std::vector<std::pair<std::int64_t, std::size_t>> near;
          for (auto k : again) near.emplace_back(std::abs(static_cast<std::int64_t>(order_[k]) - centre), k);
          std::partial_sort(near.begin(), near.begin() + static_cast<std::ptrdiff_t>(count), near.end());
          for (std::size_t i = 0; i < count; ++i) removed[near[i].second] = true;
          break;
        }
        default:
          for (std::size_t i = 0; i < (count + 3) / 4; ++i) removed[again[pick(again.size())]] = true;
      }
    }
    std::size_t kept = 0;
    for (std::size_t k = 0; k < order_.size(); ++k)
      if (!removed[k]) order_[kept++] = order_[k];
    order_.resize(kept);
    measure();
  }

  /// Moves a computation to another place nearby where it is valid: the memory changes, the time does not.
  void shift() {
    if (order_.size() < 2) return;
    const auto k = static_cast<std::size_t>(random_() % order_.size());
    const auto o = order_[k];
    std::size_t low = k, high = k;  // may stand at [low, high]
    const auto feeds = [&](operation_id a, operation_id b) {
      for (auto v : p_.operations()[b].inputs)
        if (p_.producer(v) == a) return true;
      return false;
    };
    const std::size_t reach = 1 + static_cast<std::size_t>(random_() % 40);
    while (low > 0 && k - low < reach && order_[low - 1] != o && !feeds(order_[low - 1], o)) --low;
    while (high + 1 < order_.size() && high - k < reach && order_[high + 1] != o && !feeds(o, order_[high + 1])) ++high;
    const auto to = low + static_cast<std::size_t>(random_() % (high - low + 1));
    const auto at = [&](std::size_t i) { return order_.begin() + static_cast<std::ptrdiff_t>(i); };
    if (to < k)
      std::rotate(at(to), at(k), at(k + 1));
    else
      std::rotate(at(k), at(k + 1), at(to + 1));
    measure();
  }

  /// Drops values across the positions that need too much, and computes them again before their next use, until the order fits.
  /// @param spread scores are multiplied by a random factor in [1, 1 + spread] per value
  /// @param most   the order must not take longer, s
  /// @param stop   polled now and then; true gives up
  /// @return false if that failed; the order is valid, but does not fit
  /// Complexity: O(drops (values + edges executed + closures of what is on the device)).
  bool repair(double spread = 0, double most = std::numeric_limits<double>::infinity(), const std::function<bool()>& stop = {}) {
    for (auto& f : noise_) f = 1 + spread * unit();
    const auto operations = p_.operations().size();
    for (std::size_t drops = 0; !fits(); ++drops) {
      if (drops > 2 * operations + 16 || order_.size() > 12 * operations || seconds() > most || (stop && stop())) return false;
      index_events();
      if (!drop_one()) return false;
    }
    return true;
  }

  /// Takes out recomputations whose results can be retained, most seconds per byte first.
  void retain() {
    for (bool changed = true; changed;) {
      changed = false;
      index_events();
      struct recomputation {
        double worth;
        std::size_t at, from;
        bytes_t bytes;
      };
      std::vector<recomputation> list;
      std::fill(made_.begin(), made_.end(), 0);
      for (std::size_t k = 0; k < order_.size(); ++k) {
        const auto o = order_[k];
        if (made_[o]++ == 0) continue;
        bytes_t bytes = 0;
        std::size_t from = k;
        for (auto v : p_.operations()[o].outputs) {
          const auto e = next_event(v, k + 1);
          if (!(e < last(v) ? !is_make(e) : p_.is_target(v))) continue;
          bytes += p_.values()[v].bytes;
          from = std::min(from, position(next_event(v, k) - 1) + 1);
        }
        const double area = static_cast<double>(bytes) * static_cast<double>(k - from) + 1;
        list.push_back({p_.operations()[o].seconds / area, k, from, bytes});
      }
      std::sort(list.begin(), list.end(),
                [](const auto& a, const auto& b) { return a.worth != b.worth ? a.worth > b.worth : a.at < b.at; });
      std::vector<bool> removed(order_.size(), false), touched(p_.operations().size(), false);
      for (const auto& c : list) {
        const auto o = order_[c.at];
        if (touched[o]) continue;
        bool fits = true;
        for (auto k = c.from; k < c.at && fits; ++k) fits = removed[k] || memory_[k] + c.bytes <= budget_;
        if (!fits) continue;
        for (auto k = c.from; k < c.at; ++k) memory_[k] += c.bytes;
        removed[c.at] = touched[o] = changed = true;
      }
      if (!changed) break;
      std::size_t kept = 0;
      for (std::size_t k = 0; k < order_.size(); ++k)
        if (!removed[k]) order_[kept++] = order_[k];
      order_.resize(kept);
      measure();
    }
  }

 private:
  /// A value that can be dropped across the worst position.
  struct candidate {
    double least;  ///< its score is at least that
    double gain;   ///< bytes times positions of excess that go
    value_id v;
    std::size_t to;  ///< position of its next use
  };

  double unit() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  /// Removes computations whose results nobody reads, and finds the memory every position needs.
  void measure() {
    const auto& values = p_.values();
    std::fill(wanted_.begin(), wanted_.end(), 0);
    bytes_t live = 0;
    const auto want = [&](value_id v) {
      if (!wanted_[v]) live += values[v].bytes;
      wanted_[v] = 1;
    };
    for (value_id v = 0; v < values.size(); ++v)
      if (values[v].held) want(v);
    for (auto v : p_.targets()) want(v);
    memory_.resize(order_.size());
    std::size_t kept = order_.size();
    peak_ = p_.source_bytes();
    for (std::size_t k = order_.size(); k-- > 0;) {
      const auto& op = p_.operations()[order_[k]];
      bool useful = false;
      bytes_t written = op.workspace;
      for (auto v : op.outputs) {
        written += values[v].bytes;
        useful = useful || wanted_[v];
      }
      if (!useful) continue;
      for (auto v : op.outputs) {
        if (wanted_[v]) live -= values[v].bytes;
        wanted_[v] = 0;
      }
      for (auto v : op.inputs) want(v);
      order_[--kept] = order_[k];
      memory_[kept] = live + written;
      peak_ = std::max(peak_, memory_[kept]);
    }
    order_.erase(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept));
    memory_.erase(memory_.begin(), memory_.begin() + static_cast<std::ptrdiff_t>(kept));
  }

  /// Where each value is made and used: 2 position + (1 if made), ascending.
  void index_events() {
    std::fill(first_.begin(), first_.end(), 0);
    for (auto o : order_) {
      for (auto v : p_.operations()[o].inputs) ++first_[v + 1];
      for (auto v : p_.operations()[o].outputs) ++first_[v + 1];
    }
    for (std::size_t v = 0; v + 1 < first_.size(); ++v) first_[v + 1] += first_[v];
    events_.resize(first_.back());
    next_.assign(first_.begin(), first_.end() - 1);
    for (std::size_t k = 0; k < order_.size(); ++k) {
      for (auto v : p_.operations()[order_[k]].inputs) events_[next_[v]++] = static_cast<std::uint32_t>(2 * k);
      for (auto v : p_.operations()[order_[k]].outputs) events_[next_[v]++] = static_cast<std::uint32_t>(2 * k + 1);
    }
  }
  std::size_t last(value_id v) const { return first_[v + 1]; }
  bool is_make(std::size_t event) const { return events_[event] % 2 == 1; }
  std::size_t position(std::size_t event) const { return events_[event] / 2; }
  /// The first event of `v` at position k or later.
  std::size_t next_event(value_id v, std::size_t k) const {
    const auto from = events_.begin();
    const auto end = from + static_cast<std::ptrdiff_t>(first_[v + 1]);
    return static_cast<std::size_t>(
        std::lower_bound(from + static_cast<std::ptrdiff_t>(first_[v]), end, static_cast<std::uint32_t>(2 * k)) - from);
  }
  /// Is `v` on the device before position k?
  bool alive(value_id v, std::size_t k) const {
    if (p_.values()[v].held) return true;
    const auto e = next_event(v, k);
    return e < last(v) ? !is_make(e) : p_.is_target(v);
  }
  /// The position after which `v` is not needed before position k, where it is not alive.
  std::size_t idle_from(value_id v, std::size_t k) const {
    const auto e = next_event(v, k);
    return e == first_[v] ? 0 : position(e - 1) + 1;
  }
  /// By how much bytes on the device at [from, to) raise the excess over the budget, summed over positions.
  double raise(bytes_t bytes, std::size_t from, std::size_t to) const {
    double sum = 0;
    for (auto k = from; k < to; ++k)
      if (memory_[k] + bytes > budget_) sum += static_cast<double>(std::min(bytes, memory_[k] + bytes - budget_));
    return sum;
  }

  /// Is `u` not there before position k? Remembered, as `excess_of`, until `query_` changes.
  bool missing(value_id u, std::size_t k) {
    if (looked_[u] != query_) {
      looked_[u] = query_;
      missing_[u] = !alive(u, k);
      excess_[u] = -1;
    }
    return missing_[u];
  }
  /// What retaining `u` since its last use before position k adds to the excess.
  double excess_of(value_id u, std::size_t k) {
    if (excess_[u] < 0) excess_[u] = raise(p_.values()[u].bytes, idle_from(u, k), k);
    return excess_[u];
  }

  /// What is computed again before position k to have `v` there. Missing inputs are computed too, or retained since their last
  /// use where that is cheaper at `price` seconds per byte and position of excess.
  /// @return seconds, and the excess that retention adds
  std::pair<double, double> closure(value_id v, std::size_t k, double price, std::vector<operation_id>& list) {
    const double never = std::numeric_limits<double>::infinity();
    const auto& ops = p_.operations();
    const auto repeatable = [&](operation_id o) { return o != none && !ops[o].once; };
    ++stamp_;
    list.assign(1, p_.producer(v));
    mark_[list[0]] = stamp_;
    for (std::size_t i = 0; i < list.size(); ++i)
      for (auto u : ops[list[i]].inputs) {
        const auto maker = p_.producer(u);
        if (!repeatable(maker) || mark_[maker] == stamp_ || !missing(u, k)) continue;
        mark_[maker] = stamp_;
        list.push_back(maker);
      }
    std::sort(list.begin(), list.end());
    for (auto o : list) {  // least seconds to have its outputs, shared work counted more than once
      double sum = ops[o].seconds;
      for (auto u : ops[o].inputs) {
        if (!missing(u, k)) continue;
        const auto maker = p_.producer(u);
        const double again = repeatable(maker) ? estimate_[maker] : never;
        kept_[u] = again == never || (price > 0 && excess_of(u, k) * price < again);
        sum += kept_[u] ? (price > 0 ? excess_of(u, k) * price : 0) : again;
      }
      estimate_[o] = sum;
    }
    ++stamp_;
    mark_[p_.producer(v)] = stamp_;
    double cost = 0, excess = 0;
    std::size_t kept = list.size();
    for (auto i = list.size(); i-- > 0;) {
      const auto o = list[i];
      if (mark_[o] != stamp_) continue;
      list[--kept] = o;
      cost += ops[o].seconds;
      for (auto u : ops[o].inputs) {
        if (!missing(u, k)) continue;
        if (!kept_[u])
          mark_[p_.producer(u)] = stamp_;
        else if (counted_[u] != stamp_)
          counted_[u] = stamp_, excess += excess_of(u, k);
      }
    }
    list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(kept));
    return {cost, excess};
  }

  /// Drops the value whose loss across the position of the largest excess costs least per byte and position of excess.
  bool drop_one() {
    std::size_t worst = 0;
    over_.clear();
    for (std::size_t k = 0; k < memory_.size(); ++k)
      if (memory_[k] > budget_) {
        over_.push_back(k);
        if (memory_[k] > memory_[worst]) worst = k;
      }
    if (over_.empty()) return false;  // the sources alone exceed it
    candidates_.clear();
    for (value_id v = 0; v < p_.values().size(); ++v) {
      const auto maker = p_.producer(v);
      const auto bytes = p_.values()[v].bytes;
      if (maker == none || bytes == 0 || p_.operations()[maker].once) continue;
      const auto e = next_event(v, worst);
      if (e == first_[v]) continue;
      if (e < last(v) ? is_make(e) || position(e) == worst : !p_.is_target(v)) continue;
      const auto from = position(e - 1) + 1, to = e < last(v) ? position(e) : order_.size();
      double gain = 0;
      for (auto at = std::lower_bound(over_.begin(), over_.end(), from); at != over_.end() && *at < to; ++at)
        gain += static_cast<double>(std::min(bytes, memory_[*at] - budget_));
      if (gain > 0) candidates_.push_back({p_.operations()[maker].seconds / gain * noise_[v], gain, v, to});
    }
    std::sort(candidates_.begin(), candidates_.end(),
              [](const auto& a, const auto& b) { return a.least != b.least ? a.least < b.least : a.v < b.v; });
    double lowest = std::numeric_limits<double>::infinity();
    std::size_t before = 0;
    for (const auto& [least, gain, v, to] : candidates_) {
      if (least >= lowest) break;
      ++query_;
      auto [cost, excess] = closure(v, to, 0, scratch_);
      double score = gain > excess ? cost / (gain - excess) : std::numeric_limits<double>::infinity();
      for (int round = 0; round < 4 && scratch_.size() > 1; ++round) {  // Dinkelbach's iteration for the least ratio
        const auto [less, more] = closure(v, to, std::isfinite(score) ? score : cost / gain, scratch2_);
        if (!(gain > more) || less / (gain - more) >= score * (1 - 1e-9)) break;
        score = less / (gain - more);
        std::swap(scratch_, scratch2_);
      }
      score = (score + 1e-30) * noise_[v];
      if (score < lowest) {
        lowest = score;
        before = to;
        std::swap(best_, scratch_);
      }
    }
    if (!std::isfinite(lowest)) return false;
    std::sort(best_.begin(), best_.end());
    order_.insert(order_.begin() + static_cast<std::ptrdiff_t>(before), best_.begin(), best_.end());
    measure();
    return true;
  }

  const problem& p_;
  bytes_t budget_;
  std::mt19937_64 random_;
  std::vector<operation_id> order_, scratch_, scratch2_, best_;
  std::vector<bytes_t> memory_;
  bytes_t peak_ = 0;
  std::vector<std::size_t> first_, next_, over_;
  std::vector<std::uint32_t> events_;
  std::vector<unsigned> made_;
  std::vector<std::uint64_t> mark_, counted_, looked_;  // stamps
  std::vector<double> noise_, estimate_, excess_;
  std::vector<unsigned char> wanted_, kept_, missing_;
  std::vector<candidate> candidates_;
  std::uint64_t stamp_ = 0, query_ = 0;
};

}  // namespace remat
