// SPDX-License-Identifier: Apache-2.0
/// @file
/// Destroy and repair on orders of computations, the moves of `local_search`. The destroy move removes recomputations. The
/// repair drops values and recomputes them later until the order fits the budget.
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

#include <remat/core/problem.hpp>
#include <remat/order/sequence.hpp>

namespace remat::order {

/// An order of computations with moves that make it fit a budget, or make it faster within the budget.
///
/// Equal seeds and equal calls give equal orders. The object reuses its buffers between calls; use one object per thread.
/// @code
/// remat::order::destroy_repair n(p, budget, 1);
/// n.load(remat::needed_operations(p));
/// if (n.repair()) std::cout << n.seconds() << " s within the budget\n";
/// @endcode
class destroy_repair {
 public:
  /// @param p      the problem; must outlive this object
  /// @param budget bytes
  /// @param seed   seed of all random choices
  destroy_repair(const problem& p, bytes_t budget, std::uint64_t seed)
      : p_(p), budget_(budget), random_(seed), sequence_(p), values_(p.values().size()), operations_(p.operations().size()) {
    for (value_id v = 0; v < p.values().size(); ++v)
      if (p.values()[v].bytes > 0 && repeatable(p.producer(v))) droppable_.push_back(v);
  }

  std::vector<operation_id> order() const { return sequence_.order(); }
  double seconds() const { return sequence_.seconds(); }
  /// Starts from a valid order. Complexity: O(values + edges executed).
  void load(const std::vector<operation_id>& order) { sequence_.load(order); }
  /// Peak if every value is dropped as early as possible, bytes.
  bytes_t peak() const { return sequence_.peak(); }
  bool fits() const { return peak() <= budget_; }
  /// Sets another budget, bytes.
  void set_budget(bytes_t budget) {
    budget_ = budget;
    for (auto& x : operations_) x.witness = 0;
  }
  /// Accepts all changes since the last `load`, `commit` or `roll_back`.
  void commit() { sequence_.commit(); }
  /// Undoes all changes since the last `load` or `commit`.
  void roll_back() { sequence_.roll_back(); }

  /// Destroy: removes some random recomputations. They are neighbours in the order, neighbours in the problem, or anywhere.
  void destroy() {
    const auto centre = random_recomputation();
    if (centre == none) return;
    const auto wanted_count = 1 + pick(std::size_t{1} << pick(6));
    chosen_.assign(1, centre);
    const auto choose = [&](step s) {
      if (s != sequence::no_step && s > sequence::end && !sequence_.is_first(s)) chosen_.push_back(s);
      return chosen_.size() < wanted_count;
    };
    switch (pick(3)) {
      case 0:  // neighbours in the order
        for (auto k = sequence_.slot_of(centre) + 1; k < sequence_.slots() && choose(sequence_.step_at(k)); ++k) continue;
        break;
      case 1: {  // neighbours in the problem
        const auto o = sequence_.operation(centre);
        for (index_t d = 1; d < wanted_count * 8 && chosen_.size() < wanted_count; ++d)
          for (const operation_id neighbour : {o - d, o + d})
            if (neighbour < operations_.size())
              for (auto v : p_.operations()[neighbour].outputs) {
                for (auto s : sequence_.events(v))
                  if (sequence_.makes(s, v)) choose(s);
                break;
              }
        break;
      }
      default:
        for (std::size_t i = 1; i < (wanted_count + 3) / 4; ++i) choose(random_recomputation());
    }
    for (auto s : chosen_)
      if (is_placed(s) && !sequence_.is_first(s)) sequence_.remove(s);
  }

  /// Moves a random computation to another valid place nearby. The memory changes, the time does not.
  void shift() {
    const auto s = sequence_.step_at(pick(sequence_.slots()));
    if (s == sequence::no_step || s <= sequence::end) return;
    const auto o = sequence_.operation(s);
    const auto feeds = [&](operation_id a, operation_id b) {
      const auto& inputs = sequence_.inputs(b);
      return std::any_of(inputs.begin(), inputs.end(), [&](value_id v) { return p_.producer(v) == a; });
    };
    next_choices_.clear();
    const std::size_t reach = 1 + pick(40);
    for (auto k = sequence_.slot_of(s); --k > 0 && next_choices_.size() < reach;) {
      const auto x = sequence_.step_at(k);
      if (x == sequence::no_step) continue;
      if (sequence_.operation(x) == o || feeds(sequence_.operation(x), o)) break;
      next_choices_.push_back(x);
    }
    const auto earlier = next_choices_.size();
    for (auto k = sequence_.slot_of(s) + 1; k < sequence_.slots() && next_choices_.size() < earlier + reach; ++k) {
      const auto x = sequence_.step_at(k);
      if (x == sequence::no_step) continue;
      next_choices_.push_back(x);
      if (x == sequence::end || sequence_.operation(x) == o || feeds(o, sequence_.operation(x))) break;
    }
    sequence_.move(s, next_choices_[pick(next_choices_.size())]);
  }

  /// Repair: drops values across the steps over the budget, and recomputes them before their next use, until the order fits.
  /// @param spread the score of each value is multiplied by a random factor in [1, 1 + spread]
  /// @param limit  largest time of the order, s
  /// @param stop   polled now and then; true gives up
  /// @return true if the order fits the budget; false if the repair gave up (the order is valid, but still exceeds the budget)
  /// Complexity: O(drops (values + recomputation closures of the live values)).
  bool repair(double spread = 0, double limit = std::numeric_limits<double>::infinity(), const std::function<bool()>& stop = {}) {
    for (auto& x : values_) x.noise = spread > 0 ? 1 + spread * unit() : 1;
    const auto longest = 12 * operations_.size();
    for (std::size_t drops = 0; !fits(); ++drops)
      if (drops > 2 * operations_.size() + 16 || sequence_.size() > longest || seconds() > limit || (stop && stop()) ||
          !drop_cheapest())
        return false;
    return true;
  }

  /// Recomputes `v` just before a position of the order.
  /// @param v        a value
  /// @param position number of steps before the recomputation
  /// @param deep     true: recomputes missing operands, too; false: retains them until then
  /// @return false if `v` cannot be recomputed there
  bool recompute_before(value_id v, std::size_t position, bool deep) {
    slot k = sequence_.slot_of(sequence::start);
    for (auto left = position + 1; left > 0 && sequence_.step_at(k) != sequence::end;)
      left -= sequence_.step_at(++k) != sequence::no_step;
    if (!repeatable(p_.producer(v)) || sequence_.event_from(v, k) == 0) return false;
    closure_.assign(1, p_.producer(v));
    ++query_;
    if (deep) closure(v, k, 0, closure_);
    const auto next = sequence_.step_at(k);
    std::sort(closure_.begin(), closure_.end());
    for (auto o : closure_) sequence_.insert(o, next);
    return true;
  }

  /// Removes recomputations whose outputs can be retained instead, until no more fits. The largest ratio of seconds to bytes
  /// times slots comes first.
  /// @param thorough true: also tries recomputations whose removal frees enough operands to make room
  /// @param stop     polled now and then; true ends the call early; the order still fits
  void retain(bool thorough = false, const std::function<bool()>& stop = {}) {
    struct recomputation {
      double worth;
      step s;
    };
    std::vector<recomputation> list;
    std::size_t polls = 0;
    const auto should_stop = [&] { return ++polls % 64 == 0 && stop && stop(); };
    for (bool changed = true, exact = false; changed || exact < thorough;) {
      exact = !changed;
      changed = false;
      list.clear();
      for (slot k = 0; k < sequence_.slots(); ++k) {
        const auto s = sequence_.step_at(k);
        if (s == sequence::no_step || s <= sequence::end || sequence_.is_first(s)) continue;
        if (should_stop()) return;
        const auto o = sequence_.operation(s);
        auto& x = operations_[o];
        const auto [bytes, from] = bytes_to_retain(s);
        if (!exact && x.witness > from && x.witness < k && sequence_.memory().at(x.witness) + bytes > budget_) continue;
        x.witness = sequence_.memory().first_above(budget_ - bytes, from, k);
        if (!exact && x.witness < k) continue;
        list.push_back({p_.operations()[o].seconds / (static_cast<double>(bytes) * static_cast<double>(k - from) + 1), s});
      }
      std::sort(list.begin(), list.end(),
                [](const auto& a, const auto& b) { return a.worth != b.worth ? a.worth > b.worth : a.s < b.s; });
      for (const auto& c : list) {
        if (!is_placed(c.s) || sequence_.is_first(c.s)) continue;
        if (should_stop()) return;
        const auto [bytes, from] = bytes_to_retain(c.s);
        const auto k = sequence_.slot_of(c.s);
        const bool room = sequence_.memory().first_above(budget_ - bytes, from, k) == k;
        if (!room && !exact) continue;
        const auto before = sequence_.changes();
        sequence_.remove(c.s);
        if (room || fits())
          changed = true;
        else
          sequence_.roll_back(before);
      }
    }
  }

 private:
  using step = sequence::step;
  using slot = sequence::slot;
  static constexpr std::size_t max_operations = 200;  ///< limit on the operations that recompute one value

  /// A value that can be dropped across the step that needs the most bytes.
  struct candidate {
    double min_score;  ///< lower bound on the score
    double gain;       ///< excess that the drop removes, bytes times steps
    value_id v;
    step next;  ///< next use of `v`
  };
  struct value_state {
    double noise = 1, excess = 0;  ///< `excess`: excess that retaining the value adds, up to slot `summed`
    slot summed = 0;
    std::uint64_t counted_stamp = 0, missing_stamp = 0;  ///< stamps
    bool kept = false, missing = false;
  };
  struct operation_state {
    std::uint64_t stamp = 0;
    double estimate = 0;
    slot witness = 0;  ///< slot where the outputs did not fit at the last attempt to retain them
  };

  std::size_t pick(std::size_t n) { return static_cast<std::size_t>(random_() % n); }
  double unit() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
  bool repeatable(operation_id o) const { return o != none && !p_.operations()[o].once; }
  bool is_placed(step s) const {
    return sequence_.slot_of(s) < sequence_.slots() && sequence_.step_at(sequence_.slot_of(s)) == s;
  }

  /// A random computation that is not the first of its operation, or `none`.
  step random_recomputation() {
    const auto fits = [&](step s) { return s != sequence::no_step && s > sequence::end && !sequence_.is_first(s); };
    for (int i = 0; i < 100; ++i)
      if (const auto s = sequence_.step_at(pick(sequence_.slots())); fits(s)) return s;
    for (slot k = 0; k < sequence_.slots(); ++k)
      if (fits(sequence_.step_at(k))) return sequence_.step_at(k);
    return none;
  }

  /// Bytes to retain instead of the recomputation s, and the first slot where they are retained.
  std::pair<bytes_t, slot> bytes_to_retain(step s) const {
    bytes_t bytes = 0;
    const auto k = sequence_.slot_of(s);
    auto from = k;
    for (auto v : p_.operations()[sequence_.operation(s)].outputs) {
      const auto e = sequence_.event_from(v, k);
      if (!sequence_.uses(v, e + 1)) continue;
      bytes += p_.values()[v].bytes;
      from = std::min(from, sequence_.slot_of(sequence_.events(v)[e - 1]) + 1);
    }
    return {bytes, from};
  }

  /// True if `u` is not on the device before slot k. The answer, and the sum of `excess_of`, are cached until `query_` changes.
  bool missing(value_id u, slot k) {
    auto& x = values_[u];
    if (x.missing_stamp != query_) {
      x.missing_stamp = query_;
      const auto e = sequence_.event_from(u, k);
      x.missing = !p_.values()[u].held && !sequence_.uses(u, e);
      x.excess = 0;
      x.summed = e == 0 ? 0 : sequence_.slot_of(sequence_.events(u)[e - 1]) + 1;
    }
    return x.missing;
  }
  /// Excess that retaining `u` adds from its last use up to slot k, bytes times steps. `u` is `missing`. The sum ends early at
  /// `limit` or at `gain_`.
  double excess_of(value_id u, slot k, double limit = std::numeric_limits<double>::infinity()) {
    auto& x = values_[u];
    if (const auto left = std::min(limit, gain_) - x.excess; left > 0)
      x.excess += sequence_.memory().added_excess(p_.values()[u].bytes, x.summed, k, budget_, left);
    return x.excess;
  }

  /// Finds the operations that recompute `v` before slot k. A missing input is recomputed, or retained since its last use. It is
  /// retained if that is cheaper at `price` (seconds per byte of excess and step), or if `list` has `max_operations` already.
  /// @return seconds of the recomputations, and the excess that the retained inputs add
  std::pair<double, double> closure(value_id v, slot k, double price, std::vector<operation_id>& list) {
    const double never = std::numeric_limits<double>::infinity();
    const auto& ops = p_.operations();
    ++stamp_;
    list.assign(1, p_.producer(v));
    operations_[list[0]].stamp = stamp_;
    for (std::size_t i = 0; i < list.size(); ++i)
      for (auto u : sequence_.inputs(list[i])) {
        const auto producer = p_.producer(u);
        if (!repeatable(producer) || operations_[producer].stamp == stamp_ || !missing(u, k)) continue;
        if (list.size() >= max_operations ||
            (price > 0 && excess_of(u, k, ops[producer].seconds / price) * price <= ops[producer].seconds))
          continue;
        operations_[producer].stamp = stamp_;
        list.push_back(producer);
      }
    std::sort(list.begin(), list.end());
    for (auto o : list) {  // cost of the outputs; shared work may count more than once
      double sum = ops[o].seconds;
      for (auto u : sequence_.inputs(o)) {
        if (!missing(u, k)) continue;
        const auto producer = p_.producer(u);
        const double recompute_cost =
            repeatable(producer) && operations_[producer].stamp == stamp_ ? operations_[producer].estimate : never;
        auto& kept = values_[u].kept;
        kept = recompute_cost == never || (price > 0 && excess_of(u, k, recompute_cost / price) * price < recompute_cost);
        sum += kept ? (price > 0 ? excess_of(u, k) * price : 0) : recompute_cost;
      }
      operations_[o].estimate = sum;
    }
    ++stamp_;
    operations_[p_.producer(v)].stamp = stamp_;
    double cost = 0, excess = 0;
    std::size_t kept = list.size();
    for (auto i = list.size(); i-- > 0;) {
      const auto o = list[i];
      if (operations_[o].stamp != stamp_) continue;
      list[--kept] = o;
      cost += ops[o].seconds;
      for (auto u : sequence_.inputs(o)) {
        if (!missing(u, k)) continue;
        if (!values_[u].kept)
          operations_[p_.producer(u)].stamp = stamp_;
        else if (values_[u].counted_stamp != stamp_)
          values_[u].counted_stamp = stamp_, excess += excess_of(u, k);
      }
    }
    list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(kept));
    return {cost, excess};
  }

  /// Drops the value that costs the fewest seconds per byte and step of excess removed, among the values live at the step that
  /// needs the most bytes.
  bool drop_cheapest() {
    sequence_.memory().find_above(budget_, over_);
    if (over_.empty()) return false;  // the sources alone exceed the budget
    auto heaviest = over_[0];
    sums_.assign(1, 0);
    for (auto k : over_) {
      if (sequence_.memory().at(k) > sequence_.memory().at(heaviest)) heaviest = k;
      sums_.push_back(sums_.back() + static_cast<double>(sequence_.memory().at(k) - budget_));
    }
    candidates_.clear();
    for (auto v : droppable_) {
      const auto& events = sequence_.events(v);
      if (events.size() < 2 || sequence_.slot_of(events.front()) >= heaviest || sequence_.slot_of(events.back()) <= heaviest)
        continue;
      const auto e = sequence_.event_from(v, heaviest);
      const auto to = sequence_.slot_of(events[e]);
      if (to == heaviest || !sequence_.uses(v, e)) continue;
      const auto from = sequence_.slot_of(events[e - 1]) + 1;
      const auto first = std::lower_bound(over_.begin(), over_.end(), from) - over_.begin();
      const auto end = std::lower_bound(over_.begin() + first, over_.end(), to) - over_.begin();
      const auto gain = std::min(static_cast<double>(p_.values()[v].bytes) * static_cast<double>(end - first),
                                 sums_[static_cast<std::size_t>(end)] - sums_[static_cast<std::size_t>(first)]);
      if (gain > 0)
        candidates_.push_back({p_.operations()[p_.producer(v)].seconds / gain * values_[v].noise, gain, v, events[e]});
    }
    std::sort(candidates_.begin(), candidates_.end(),
              [](const auto& a, const auto& b) { return a.min_score != b.min_score ? a.min_score < b.min_score : a.v < b.v; });
    double best_score = std::numeric_limits<double>::infinity();
    step insert_before = 0;
    for (const auto& [min_score, gain, v, next] : candidates_) {
      if (min_score >= best_score) break;
      ++query_;
      gain_ = gain;
      const auto k = sequence_.slot_of(next);
      const double noise = values_[v].noise;
      auto [cost, excess] = closure(v, k, std::isfinite(best_score) ? best_score / noise : 0, closure_);
      double score = gain > excess ? cost / (gain - excess) : std::numeric_limits<double>::infinity();
      if (std::isfinite(best_score) && score * noise >= best_score) continue;
      for (int round = 0; round < 4 && closure_.size() > 1; ++round) {  // Dinkelbach's iteration for the least ratio
        const auto [other_cost, other_excess] = closure(v, k, std::isfinite(score) ? score : cost / gain, other_closure_);
        if (!(gain > other_excess) || other_cost / (gain - other_excess) >= score * (1 - 1e-9)) break;
        score = other_cost / (gain - other_excess);
        std::swap(closure_, other_closure_);
      }
      score = (score + 1e-30) * noise;
      if (score < best_score) {
        best_score = score;
        insert_before = next;
        std::swap(best_closure_, closure_);
      }
    }
    if (!std::isfinite(best_score)) return false;
    std::sort(best_closure_.begin(), best_closure_.end());
    for (auto o : best_closure_) sequence_.insert(o, insert_before);
    return true;
  }

  const problem& p_;
  bytes_t budget_;
  std::mt19937_64 random_;
  sequence sequence_;
  std::vector<value_state> values_;
  std::vector<operation_state> operations_;
  std::vector<value_id> droppable_;
  std::vector<operation_id> closure_, other_closure_, best_closure_;
  std::vector<step> chosen_, next_choices_;
  std::vector<slot> over_;
  std::vector<double> sums_;
  std::vector<candidate> candidates_;
  std::uint64_t stamp_ = 0, query_ = 0;
  double gain_ = 0;
};

}  // namespace remat::order
