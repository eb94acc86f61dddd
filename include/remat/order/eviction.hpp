// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makes an order of computations fit a budget by dropping and recomputing values.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>

namespace remat::order {

/// Replays an order within a budget. Before a computation that would not fit, values are dropped. Values that are large, cheap to
/// recompute and not needed for long go first. A dropped value is recomputed before its next use. This is dynamic tensor
/// rematerialization with a known future.
///
/// Reference: Kirisame et al., "Dynamic tensor rematerialization", ICLR 2021 (score h_DTR).
class eviction {
 public:
  struct options {
    double distance = 1;           ///< exponent of the distance to the next use, >= 0
    std::size_t repetitions = 12;  ///< gives up if the new order is this many times as long as the given one
    std::size_t work = 30000000;   ///< gives up after that many visits of values and operations
  };

  /// Exponents of the distance to try.
  static constexpr std::array<double, 3> distances = {1.0, 0.5, 2.0};

  /// @param p     the problem
  /// @param order a valid order of computations
  /// Both must outlive this. Complexity: O((values + edges) log(values)).
  eviction(const problem& p, std::span<const operation_id> order)
      : p_(p), order_(order), used_at_(p.values().size()), computed_at_(p.values().size()) {
    for (std::size_t k = 0; k < order.size(); ++k) {
      for (auto v : p.operations()[order[k]].inputs) used_at_[v].push_back(k);
      for (auto v : p.operations()[order[k]].outputs) computed_at_[v].push_back(k);
    }
    for (auto v : p.targets()) used_at_[v].push_back(order.size() + 1);  // after all recomputations of targets
    for (value_id v = 0; v < p.values().size(); ++v)
      may_lose_values_ = may_lose_values_ || (p.is_source(v) && !p.values()[v].held);
    for (const auto& op : p.operations()) may_lose_values_ = may_lose_values_ || op.once;
    std::map<int, std::size_t> classes;
    rate_class_.assign(p.values().size(), none);
    for (value_id v = 0; v < rate_class_.size(); ++v) {
      if (p.is_source(v) || p.values()[v].bytes == 0) continue;
      const auto rate_class = classes.emplace(static_cast<int>(std::floor(4 * std::log2(rate(v)))), classes.size()).first->second;
      if (rate_class == max_rate_.size()) max_rate_.push_back(0);
      max_rate_[rate_class] = std::max(max_rate_[rate_class], rate(v));
      rate_class_[v] = static_cast<index_t>(rate_class);
    }
  }

  /// @param budget bytes
  /// @param o      exponent of the score, and limits
  /// @param stop   polled now and then, also within searches; true gives up
  /// @return an order that fits the budget, or nothing
  /// Complexity: O(evictions * rate classes + edges executed * log(values)), and the recomputation closures of the candidates. A
  /// rate class has values that differ by less than a fifth in bytes per second of computation.
  std::optional<std::vector<operation_id>> run(bytes_t budget, const options& o, const std::function<bool()>& stop = {}) {
    reset(budget, o);
    stop_ = stop;
    for (position_ = 0; position_ < order_.size(); ++position_) {
      if (position_ % 64 == 0 && stop_ && stop_()) return std::nullopt;
      for (auto v : p_.operations()[order_[position_]].inputs)
        if (on_device_[v]) dequeue(v), enqueue(v);  // the next use has changed
      const auto& outputs = p_.operations()[order_[position_]].outputs;
      const bool skip = std::all_of(outputs.begin(), outputs.end(), [&](value_id v) { return on_device_[v] || !is_live(v); });
      if (skip) {
        release(p_.operations()[order_[position_]].inputs);
      } else if (!compute(order_[position_])) {
        return std::nullopt;
      }
      if (!deferred_.empty()) release(std::exchange(deferred_, {}));
    }
    const auto& targets = p_.targets();
    for (std::size_t i = 0; i < targets.size();) {
      if (stopped_) return std::nullopt;
      if (on_device_[targets[i]]) {
        ++i;
        continue;
      }
      if (p_.is_source(targets[i]) || !compute(p_.producer(targets[i]))) return std::nullopt;
      i = 0;  // `compute` may have dropped earlier targets
    }
    return prune_order(p_, new_order_);
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();

  void reset(bytes_t budget, const options& o) {
    budget_ = budget;
    options_ = o;
    position_ = work_ = 0;
    stopped_ = false;
    new_order_.clear();
    queues_.assign(max_rate_.size(), {});
    deferred_.clear();
    evicted_.clear();
    live_ = 0;
    on_device_.assign(p_.values().size(), false);
    queued_use_.assign(p_.values().size(), 0);
    locks_.assign(p_.values().size(), 0);
    next_use_index_.assign(p_.values().size(), 0);
    next_computed_index_.assign(p_.values().size(), 0);
    has_run_.assign(p_.operations().size(), false);
    visited_.assign(p_.operations().size(), 0);
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && (p_.values()[v].held || !used_at_[v].empty())) add(v);
  }

  /// Bytes per second of recomputation.
  double rate(value_id v) const {
    return static_cast<double>(p_.values()[v].bytes) / (p_.operations()[p_.producer(v)].seconds + 1e-30);
  }
  void enqueue(value_id v) {
    if (rate_class_[v] != none) queues_[rate_class_[v]].emplace(queued_use_[v] = next_use(v), v);
  }
  void dequeue(value_id v) {
    if (rate_class_[v] != none) queues_[rate_class_[v]].erase({queued_use_[v], v});
  }
  void add(value_id v) {
    if (on_device_[v]) return;
    on_device_[v] = true;
    live_ += p_.values()[v].bytes;
    enqueue(v);
  }
  void drop(value_id v) {
    on_device_[v] = false;
    live_ -= p_.values()[v].bytes;
    dequeue(v);
  }

  /// Position of the next use of `v` after the current position; beyond the length of the order + 1 if there is none.
  std::size_t next_use(value_id v) {
    auto& index = next_use_index_[v];
    while (index < used_at_[v].size() && used_at_[v][index] <= position_) ++index;
    return index < used_at_[v].size() ? used_at_[v][index] : order_.size() + 2;
  }
  /// True if `v` is read after the current position before the order computes it again.
  bool is_live(value_id v) {
    const auto use = next_use(v);
    if (use > order_.size() + 1) return false;
    auto& index = next_computed_index_[v];
    while (index < computed_at_[v].size() && computed_at_[v][index] <= position_) ++index;
    return index == computed_at_[v].size() || computed_at_[v][index] >= use;
  }

  /// Finds the operations that recompute `v` from the values on the device.
  /// @return their seconds; `never` if `v` is lost, or if they take more than `limit`
  double closure(value_id v, std::vector<operation_id>& ops, double limit = never) {
    ops.clear();
    if (p_.is_source(v)) return never;
    ++stamp_;
    visited_[p_.producer(v)] = stamp_;
    ops.push_back(p_.producer(v));
    double sum = 0;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (++work_ % 1024 == 0) stopped_ = stopped_ || (stop_ && stop_());
      if (stopped_) return never;
      const auto& op = p_.operations()[ops[i]];
      sum += op.seconds;
      if ((op.once && has_run_[ops[i]]) || sum > limit) return never;
      for (auto u : op.inputs) {
        if (on_device_[u]) continue;
        if (p_.is_source(u)) return never;
        const auto producer = p_.producer(u);
        if (visited_[producer] == stamp_) continue;
        visited_[producer] = stamp_;
        ops.push_back(producer);
      }
    }
    return sum;
  }

  /// Drops those of `values` that are not read again.
  void release(const std::vector<value_id>& values) {
    for (auto v : values) {
      if (!on_device_[v] || locks_[v] > 0 || p_.values()[v].held || is_live(v)) continue;
      if (may_lose_values_ && closure(v, closure_) == never && is_irreplaceable(v)) {
        deferred_.push_back(v);
        continue;
      }
      drop(v);
    }
  }
  /// True if a missing value that is still needed could not be recomputed without `v`.
  bool is_irreplaceable(value_id v) {
    on_device_[v] = false;
    std::erase_if(evicted_, [&](value_id w) { return on_device_[w] || !is_live(w); });
    const bool needed = std::any_of(evicted_.begin(), evicted_.end(), [&](value_id w) { return closure(w, closure_) == never; });
    on_device_[v] = true;
    return needed;
  }

  /// Recomputes the missing inputs of `o`, then computes `o`.
  bool compute(operation_id o) {
    if (p_.operations()[o].once && has_run_[o]) return false;
    std::vector<operation_id> list = {o}, missing;
    for (auto v : p_.operations()[o].inputs) {
      if (on_device_[v]) continue;
      if (closure(v, missing) == never) return false;
      list.insert(list.end(), missing.begin(), missing.end());
    }
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    for (auto x : list)
      for (auto v : p_.operations()[x].inputs) ++locks_[v];
    bool done = true;
    for (auto x : list) {
      const auto& op = p_.operations()[x];
      done = done && make_room(p_.new_bytes(x));
      for (auto v : op.inputs) --locks_[v];
      if (!done) continue;
      new_order_.push_back(x);
      has_run_[x] = true;
      for (auto v : op.outputs) add(v);
      release(op.inputs);
      release(op.outputs);
    }
    return done && new_order_.size() <= options_.repetitions * order_.size();
  }

  bool make_room(bytes_t need) {
    while (live_ + need > budget_) {
      value_id victim = none;
      double best_score = -1;
      for (std::size_t rate_class = 0; rate_class < queues_.size(); ++rate_class)
        for (auto entry = queues_[rate_class].rbegin(); entry != queues_[rate_class].rend(); ++entry) {
          const auto v = entry->second;
          ++work_;
          const auto distance = std::pow(static_cast<double>(entry->first - position_), options_.distance);
          if (max_rate_[rate_class] * distance <= best_score) break;        // values with an earlier use score less
          if (locks_[v] > 0 || rate(v) * distance <= best_score) continue;  // missing operands only add to the cost
          const auto gain = static_cast<double>(p_.values()[v].bytes) * distance;
          on_device_[v] = false;
          const auto seconds = closure(v, closure_, best_score > 0 ? gain / best_score : never);
          on_device_[v] = true;
          if (seconds == never) continue;
          const double score = gain / (seconds + 1e-30);
          if (score > best_score) best_score = score, victim = v;
        }
      if (victim == none || work_ > options_.work || stopped_) return false;
      drop(victim);
      evicted_.push_back(victim);
    }
    return true;
  }
  const problem& p_;
  std::span<const operation_id> order_;
  std::vector<std::vector<std::size_t>> used_at_, computed_at_;  // positions in the order, per value
  bool may_lose_values_ = false;                                 // true if some values cannot be recomputed once dropped
  std::vector<index_t> rate_class_;                              // per value; none: never dropped
  std::vector<double> max_rate_;                                 // per rate class: the largest `rate`
  std::vector<std::set<std::pair<std::size_t, value_id>>>
      queues_;  // per rate class: next use and value, for the values on the device
  bytes_t budget_ = 0, live_ = 0;
  options options_;
  std::size_t position_ = 0, work_ = 0;
  std::vector<operation_id> new_order_, closure_;
  std::vector<value_id> deferred_, evicted_;
  std::vector<bool> on_device_, has_run_;
  std::vector<std::size_t> queued_use_, next_use_index_, next_computed_index_;
  std::function<bool()> stop_;
  bool stopped_ = false;
  std::vector<unsigned> locks_, visited_;
  unsigned stamp_ = 0;
};

/// Calls `take` with each order that `eviction` makes of `order`, for several exponents of the distance.
/// Complexity: that of `eviction::run`, three times.
template <std::invocable<std::vector<operation_id>> Take>
void evict_with_each_exponent(const problem& p, std::span<const operation_id> order, bytes_t budget,
                              const std::function<bool()>& stop, Take&& take) {
  eviction e(p, order);
  for (const double distance : eviction::distances)
    if (auto evicted = e.run(budget, {.distance = distance}, stop)) take(std::move(*evicted));
}

}  // namespace remat::order
