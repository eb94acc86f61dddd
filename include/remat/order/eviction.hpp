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
      : p_(p), order_(order), uses_(p.values().size()), made_(p.values().size()) {
    for (std::size_t k = 0; k < order.size(); ++k) {
      for (auto v : p.operations()[order[k]].inputs) uses_[v].push_back(k);
      for (auto v : p.operations()[order[k]].outputs) made_[v].push_back(k);
    }
    for (auto v : p.targets()) uses_[v].push_back(order.size() + 1);  // after all recomputations of targets
    for (value_id v = 0; v < p.values().size(); ++v) lossy_ = lossy_ || (p.is_source(v) && !p.values()[v].held);
    for (const auto& op : p.operations()) lossy_ = lossy_ || op.once;
    std::map<int, std::size_t> places;
    kind_.assign(p.values().size(), none);
    for (value_id v = 0; v < kind_.size(); ++v) {
      if (p.is_source(v) || p.values()[v].bytes == 0) continue;
      const auto at = places.emplace(static_cast<int>(std::floor(4 * std::log2(rate(v)))), places.size()).first->second;
      if (at == max_rate_.size()) max_rate_.push_back(0);
      max_rate_[at] = std::max(max_rate_[at], rate(v));
      kind_[v] = static_cast<index_t>(at);
    }
  }

  /// @param budget bytes
  /// @param o      exponent of the score, and limits
  /// @param stop   polled now and then, also within searches; true gives up
  /// @return an order that fits the budget, or nothing
  /// Complexity: O(evictions * kinds + edges executed * log(values)), and the recomputation closures of the candidates. A kind
  /// is a class of values that differ by less than a fifth in bytes per second of computation.
  std::optional<std::vector<operation_id>> run(bytes_t budget, const options& o, const std::function<bool()>& stop = {}) {
    start(budget, o);
    stop_ = stop;
    for (now_ = 0; now_ < order_.size(); ++now_) {
      if (now_ % 64 == 0 && stop_ && stop_()) return std::nullopt;
      for (auto v : p_.operations()[order_[now_]].inputs)
        if (on_device_[v]) unlist(v), list(v);  // the next use has changed
      const auto& outputs = p_.operations()[order_[now_]].outputs;
      const bool useless = std::all_of(outputs.begin(), outputs.end(), [&](value_id v) { return on_device_[v] || !alive(v); });
      if (useless) {
        release(p_.operations()[order_[now_]].inputs);
      } else if (!compute(order_[now_])) {
        return std::nullopt;
      }
      if (!kept_.empty()) release(std::exchange(kept_, {}));
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
    return prune_order(p_, result_);
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();

  void start(bytes_t budget, const options& o) {
    budget_ = budget;
    options_ = o;
    now_ = work_ = 0;
    stopped_ = false;
    result_.clear();
    by_use_.assign(max_rate_.size(), {});
    kept_.clear();
    missing_.clear();
    live_ = 0;
    on_device_.assign(p_.values().size(), false);
    listed_.assign(p_.values().size(), 0);
    locks_.assign(p_.values().size(), 0);
    use_at_.assign(p_.values().size(), 0);
    made_at_.assign(p_.values().size(), 0);
    has_run_.assign(p_.operations().size(), false);
    mark_.assign(p_.operations().size(), 0);
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && (p_.values()[v].held || !uses_[v].empty())) put(v);
  }

  /// Bytes per second of recomputation.
  double rate(value_id v) const {
    return static_cast<double>(p_.values()[v].bytes) / (p_.operations()[p_.producer(v)].seconds + 1e-30);
  }
  void list(value_id v) {
    if (kind_[v] != none) by_use_[kind_[v]].emplace(listed_[v] = next_use(v), v);
  }
  void unlist(value_id v) {
    if (kind_[v] != none) by_use_[kind_[v]].erase({listed_[v], v});
  }
  void put(value_id v) {
    if (on_device_[v]) return;
    on_device_[v] = true;
    live_ += p_.values()[v].bytes;
    list(v);
  }
  void take(value_id v) {
    on_device_[v] = false;
    live_ -= p_.values()[v].bytes;
    unlist(v);
  }

  /// Position of the next use of `v` after the current position; beyond the length of the order + 1 if there is none.
  std::size_t next_use(value_id v) {
    auto& at = use_at_[v];
    while (at < uses_[v].size() && uses_[v][at] <= now_) ++at;
    return at < uses_[v].size() ? uses_[v][at] : order_.size() + 2;
  }
  /// True if `v` is read after the current position before the order computes it again.
  bool alive(value_id v) {
    const auto use = next_use(v);
    if (use > order_.size() + 1) return false;
    auto& at = made_at_[v];
    while (at < made_[v].size() && made_[v][at] <= now_) ++at;
    return at == made_[v].size() || made_[v][at] >= use;
  }

  /// Finds the operations that recompute `v` from the values on the device.
  /// @return their seconds; `never` if `v` is lost, or if they take more than `limit`
  double closure(value_id v, std::vector<operation_id>& ops, double limit = never) {
    ops.clear();
    if (p_.is_source(v)) return never;
    ++stamp_;
    mark_[p_.producer(v)] = stamp_;
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
        const auto maker = p_.producer(u);
        if (mark_[maker] == stamp_) continue;
        mark_[maker] = stamp_;
        ops.push_back(maker);
      }
    }
    return sum;
  }

  /// Drops those of `values` that are not read again.
  void release(const std::vector<value_id>& values) {
    for (auto v : values) {
      if (!on_device_[v] || locks_[v] > 0 || p_.values()[v].held || alive(v)) continue;
      if (lossy_ && closure(v, scratch_) == never && last_resort(v)) {
        kept_.push_back(v);
        continue;
      }
      take(v);
    }
  }
  /// True if a missing value that is still needed could not be recomputed without `v`.
  bool last_resort(value_id v) {
    on_device_[v] = false;
    std::erase_if(missing_, [&](value_id w) { return on_device_[w] || !alive(w); });
    const bool needed = std::any_of(missing_.begin(), missing_.end(), [&](value_id w) { return closure(w, scratch_) == never; });
    on_device_[v] = true;
    return needed;
  }

  /// Recomputes the missing inputs of `o`, then computes `o`.
  bool compute(operation_id o) {
    if (p_.operations()[o].once && has_run_[o]) return false;
    std::vector<operation_id> list = {o}, more;
    for (auto v : p_.operations()[o].inputs) {
      if (on_device_[v]) continue;
      if (closure(v, more) == never) return false;
      list.insert(list.end(), more.begin(), more.end());
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
      result_.push_back(x);
      has_run_[x] = true;
      for (auto v : op.outputs) put(v);
      release(op.inputs);
      release(op.outputs);
    }
    return done && result_.size() <= options_.repetitions * order_.size();
  }

  bool make_room(bytes_t need) {
    while (live_ + need > budget_) {
      value_id worst = none;
      double highest = -1;
      for (std::size_t kind = 0; kind < by_use_.size(); ++kind)
        for (auto at = by_use_[kind].rbegin(); at != by_use_[kind].rend(); ++at) {
          const auto v = at->second;
          ++work_;
          const auto distance = std::pow(static_cast<double>(at->first - now_), options_.distance);
          if (max_rate_[kind] * distance <= highest) break;              // values with an earlier use score less
          if (locks_[v] > 0 || rate(v) * distance <= highest) continue;  // missing operands only add to the cost
          const auto gain = static_cast<double>(p_.values()[v].bytes) * distance;
          on_device_[v] = false;
          const auto again = closure(v, scratch_, highest > 0 ? gain / highest : never);
          on_device_[v] = true;
          if (again == never) continue;
          const double score = gain / (again + 1e-30);
          if (score > highest) highest = score, worst = v;
        }
      if (worst == none || work_ > options_.work || stopped_) return false;
      take(worst);
      missing_.push_back(worst);
    }
    return true;
  }
  const problem& p_;
  std::span<const operation_id> order_;
  std::vector<std::vector<std::size_t>> uses_, made_;               // positions in the order, per value
  bool lossy_ = false;                                              // true if some values cannot be recomputed once dropped
  std::vector<index_t> kind_;                                       // per value; none: never dropped
  std::vector<double> max_rate_;                                    // per kind: the largest `rate`
  std::vector<std::set<std::pair<std::size_t, value_id>>> by_use_;  // per kind: next use and value, for the values on the device
  bytes_t budget_ = 0, live_ = 0;
  options options_;
  std::size_t now_ = 0, work_ = 0;
  std::vector<operation_id> result_, scratch_;
  std::vector<value_id> kept_, missing_;
  std::vector<bool> on_device_, has_run_;
  std::vector<std::size_t> listed_, use_at_, made_at_;
  std::function<bool()> stop_;
  bool stopped_ = false;
  std::vector<unsigned> locks_, mark_;
  unsigned stamp_ = 0;
};

/// Calls `take` with each order that `eviction` makes of `order`, for several exponents of the distance.
/// Complexity: that of `eviction::run`, three times.
template <std::invocable<std::vector<operation_id>> Take>
void evict_variously(const problem& p, std::span<const operation_id> order, bytes_t budget, const std::function<bool()>& stop,
                     Take&& take) {
  eviction e(p, order);
  for (const double distance : eviction::distances)
    if (auto evicted = e.run(budget, {.distance = distance}, stop)) take(std::move(*evicted));
}

}  // namespace remat::order
