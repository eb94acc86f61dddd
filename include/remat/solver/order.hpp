// SPDX-License-Identifier: Apache-2.0
/// @file
/// Work on orders of computations: what an order needs, an order made to fit a budget by evictions, recomputations made
/// unnecessary by retention. Building blocks of the heuristics; `evaluate` judges what comes out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// What an order of computations needs if every value is dropped as early as possible (as by `with_drops`).
struct order_needs {
  bytes_t peak = 0;             ///< bytes
  double seconds = 0;           ///< sum of the costs, s
  std::vector<bytes_t> memory;  ///< bytes while position i is computed
};

/// Measures a valid order in one backward pass.
/// Complexity: O(values + edges executed).
inline order_needs measure_order(const problem& p, std::span<const index_t> order) {
  const auto& values = p.values();
  order_needs n;
  n.memory.resize(order.size());
  n.peak = p.source_bytes();
  std::vector<bool> wanted(values.size(), false);
  bytes_t live = 0;
  const auto want = [&](index_t v) {
    if (!wanted[v]) live += values[v].bytes;
    wanted[v] = true;
  };
  for (index_t v = 0; v < values.size(); ++v)
    if (values[v].held) want(v);
  for (auto v : p.targets()) want(v);
  for (std::size_t k = order.size(); k-- > 0;) {
    const auto& op = p.operations()[order[k]];
    bytes_t written = op.workspace;
    for (auto v : op.outputs) {
      written += values[v].bytes;
      if (wanted[v]) live -= values[v].bytes;
      wanted[v] = false;
    }
    for (auto v : op.inputs) want(v);
    n.memory[k] = live + written;
    n.peak = std::max(n.peak, n.memory[k]);
    n.seconds += op.seconds;
  }
  return n;
}

/// The order without the computations whose outputs nobody reads before they are computed again.
/// Complexity: O(values + edges executed).
inline std::vector<index_t> prune_order(const problem& p, std::span<const index_t> order) {
  std::vector<bool> wanted(p.values().size(), false);
  for (auto v : p.targets()) wanted[v] = true;
  std::vector<index_t> kept;
  for (std::size_t k = order.size(); k-- > 0;) {
    const auto& op = p.operations()[order[k]];
    if (std::none_of(op.outputs.begin(), op.outputs.end(), [&](index_t v) { return wanted[v]; })) continue;
    for (auto v : op.outputs) wanted[v] = false;
    for (auto v : op.inputs) wanted[v] = true;
    kept.push_back(order[k]);
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

/// Finds what has to run before values or operations can be used.
class missing_operations {
 public:
  explicit missing_operations(const problem& p) : p_(p), marked_(p.operations().size(), false) {}

  /// @param wanted values
  /// @param there  per value: on the device; sources are
  /// @return what makes those of `wanted` that are not there, and what that lacks in turn, in the order of the problem
  /// Complexity: O(k log k + edges) for k operations and their operands.
  std::vector<index_t> for_values(std::span<const index_t> wanted, const std::vector<bool>& there) {
    std::vector<index_t> found;
    const auto need = [&](index_t v) {
      if (there[v] || marked_[p_.producer(v)]) return;
      marked_[p_.producer(v)] = true;
      found.push_back(p_.producer(v));
    };
    for (auto v : wanted) need(v);
    for (std::size_t i = 0; i < found.size(); ++i)
      for (auto v : p_.operations()[found[i]].inputs) need(v);
    std::sort(found.begin(), found.end());
    for (auto o : found) marked_[o] = false;
    return found;
  }
  /// The same for the operands of `o`, with `o` at the end.
  std::vector<index_t> for_operation(index_t o, const std::vector<bool>& there) {
    auto found = for_values(p_.operations()[o].inputs, there);
    found.push_back(o);
    return found;
  }

 private:
  const problem& p_;
  std::vector<bool> marked_;  // per operation: found in the current search
};

/// Computes everything up to `tau` once, forgets what is not retained, goes on and computes what is missing when it is needed.
/// @param p        the problem
/// @param needed   `needed_operations(p)`
/// @param tau      one of them
/// @param retained per value: kept across `tau`, if made before; the operands of `tau` are
/// @param later    per operation: computed after `tau` only, unless `tau` depends on it
/// @return the order, or nothing if a once-only operation would have to run again
/// Complexity: O(values + edges executed).
inline std::optional<std::vector<index_t>> order_across(const problem& p, const std::vector<index_t>& needed, index_t tau,
                                                        const std::vector<bool>& retained, const std::vector<bool>& later) {
  const auto& ops = p.operations();
  std::vector<bool> there(p.values().size(), false), has_run(ops.size(), false);
  for (index_t v = 0; v < there.size(); ++v) there[v] = p.is_source(v);
  std::vector<index_t> order;
  missing_operations missing(p);
  const auto run = [&](index_t o) {
    for (auto x : missing.for_operation(o, there)) {
      if (ops[x].once && has_run[x]) return false;
      has_run[x] = true;
      order.push_back(x);
      for (auto v : ops[x].outputs) there[v] = true;
    }
    return true;
  };
  std::vector<bool> delayed(ops.size(), false);  // not an ancestor of tau and wanted later only
  {
    std::vector<bool> ancestor(ops.size(), false);
    for (auto o = tau + 1; o-- > 0;)
      if (o == tau || ancestor[o])
        for (auto v : ops[o].inputs)
          if (!p.is_source(v)) ancestor[p.producer(v)] = true;
    for (index_t o = 0; o < tau; ++o) delayed[o] = later[o] && !ancestor[o];
  }
  for (auto o : needed) {
    if (o == tau) {
      const auto& operands = ops[tau].inputs;
      for (index_t v = 0; v < there.size(); ++v)
        if (!p.is_source(v) && !retained[v] && !std::binary_search(operands.begin(), operands.end(), v)) there[v] = false;
    }
    if (o < tau && delayed[o]) continue;
    if (has_run[o] && o > tau) continue;
    if (!run(o)) return std::nullopt;
  }
  for (auto v : p.targets())
    if (!there[v] && !run(p.producer(v))) return std::nullopt;
  return prune_order(p, order);
}

namespace detail {

/// Does a valid order without those `removed`, and without what nobody reads then, need no more than `budget` bytes while it
/// computes? Gives up at the first that does. `wanted` is a buffer. Complexity: O(values + edges executed).
inline bool fits_without(const problem& p, std::span<const index_t> order, const std::vector<bool>& removed, bytes_t budget,
                         std::vector<unsigned char>& wanted) {
  const auto& values = p.values();
  wanted.assign(values.size(), 0);
  bytes_t live = p.held_bytes();
  for (index_t v = 0; v < values.size(); ++v) wanted[v] = values[v].held;
  const auto want = [&](index_t v) {
    if (!wanted[v]) live += values[v].bytes;
    wanted[v] = 1;
  };
  for (auto v : p.targets()) want(v);
  for (std::size_t k = order.size(); k-- > 0;) {
    const auto& op = p.operations()[order[k]];
    if (removed[k] || std::none_of(op.outputs.begin(), op.outputs.end(), [&](index_t v) { return wanted[v] != 0; })) continue;
    bytes_t written = op.workspace;
    for (auto v : op.outputs) {
      written += values[v].bytes;
      if (wanted[v]) live -= values[v].bytes;
      wanted[v] = 0;
    }
    for (auto v : op.inputs) want(v);
    if (live + written > budget) return false;
  }
  return true;
}

}  // namespace detail

/// Removes recomputations whose results can be retained within the budget, most seconds per byte retained first, until none is
/// left.
/// @param p      the problem
/// @param order  a valid order, in any case within the budget
/// @param budget bytes
/// @param stop   polled now and then; true ends the search with what there is
/// @return an order that is no slower
/// Complexity: O(recomputations * distance to the computation before) per round, and 100 000 steps or 20 passes over the order;
/// few rounds.
inline std::vector<index_t> retain_more(const problem& p, std::vector<index_t> order, bytes_t budget,
                                        const std::function<bool()>& stop = {}) {
  struct candidate {
    std::size_t at, before;
    bytes_t bytes;
    double worth;
  };
  bool changed = true;
  while (changed && !(stop && stop())) {
    changed = false;
    std::vector<candidate> candidates;
    {
      std::vector<std::size_t> last(p.operations().size(), order.size());
      std::vector<bool> wanted(p.values().size(), false);
      for (auto v : p.targets()) wanted[v] = true;
      std::vector<bytes_t> needed(order.size(), 0);
      for (std::size_t k = order.size(); k-- > 0;) {
        const auto& op = p.operations()[order[k]];
        for (auto v : op.outputs) {
          if (wanted[v]) needed[k] += p.values()[v].bytes;
          wanted[v] = false;
        }
        for (auto v : op.inputs) wanted[v] = true;
      }
      for (std::size_t k = 0; k < order.size(); ++k) {
        auto& before = last[order[k]];
        if (before != order.size())
          candidates.push_back(
              {k, before, needed[k],
               p.operations()[order[k]].seconds / (static_cast<double>(needed[k]) * static_cast<double>(k - before) + 1)});
        before = k;
      }
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.worth > b.worth; });
    std::vector<bool> removed(order.size(), false), touched(p.operations().size(), false);
    auto memory = measure_order(p, order).memory;
    std::vector<unsigned char> wanted;
    auto looks = std::max<std::ptrdiff_t>(20, 100'000 / static_cast<std::ptrdiff_t>(order.size() + 1));  // few of them succeed
    for (const auto& c : candidates) {
      if (stop && stop()) break;
      if (touched[order[c.at]]) continue;  // its previous computation may have gone: next round
      const auto highest = c.at == c.before + 1 ? 0
                                                : *std::max_element(memory.begin() + static_cast<std::ptrdiff_t>(c.before) + 1,
                                                                    memory.begin() + static_cast<std::ptrdiff_t>(c.at));
      removed[c.at] = true;
      bool fits = highest + c.bytes <= budget;
      if (!fits && highest <= budget + c.bytes && looks-- > 0) fits = detail::fits_without(p, order, removed, budget, wanted);
      if (!fits) {
        removed[c.at] = false;
        continue;
      }
      for (auto k = c.before + 1; k < c.at; ++k) memory[k] += c.bytes;
      touched[order[c.at]] = changed = true;
    }
    std::vector<index_t> rest;
    for (std::size_t k = 0; k < order.size(); ++k)
      if (!removed[k]) rest.push_back(order[k]);
    order = prune_order(p, rest);
  }
  return order;
}

/// The fastest order found so far within a budget.
class incumbent {
 public:
  incumbent(const problem& p, bytes_t budget) : p_(p), budget_(budget) {}

  bool found() const { return found_; }
  bytes_t budget() const { return budget_; }
  const std::vector<index_t>& order() const { return order_; }
  double seconds() const { return seconds_; }
  /// Takes `order` if it fits and is faster; `evaluate` has the last word.
  /// @return true if it was taken
  /// Complexity: O(values + edges executed).
  bool offer(const std::vector<index_t>& order) {
    const auto needs = measure_order(p_, order);
    if (needs.peak > budget_ || needs.seconds >= seconds_) return false;
    try {
      if (evaluate(p_, with_drops(p_, order)).peak > budget_) return false;
    } catch (const bad_schedule&) {  // computes a once-only operation again
      return false;
    }
    order_ = order;
    seconds_ = needs.seconds;
    return found_ = true;
  }
  /// The schedule, if there is one.
  void put_into(result& r) const {
    if (!found_) return;
    r.status = status::feasible;
    r.schedule = with_drops(p_, order_);
  }

 private:
  const problem& p_;
  bytes_t budget_;
  std::vector<index_t> order_;
  double seconds_ = std::numeric_limits<double>::infinity();
  bool found_ = false;
};

/// Plays an order within a budget: before a computation that would not fit, values are evicted, those first that are large, cheap
/// to make again and not needed for long; what is missing when it is needed is computed again. Dynamic tensor rematerialization
/// with the future known (Kirisame et al., ICLR 2021, score h_DTR).
class eviction {
 public:
  struct options {
    double distance = 1;           ///< exponent of the distance to the next use, >= 0
    std::size_t repetitions = 12;  ///< gives up once the order is this many times as long
  };

  /// Complexity: O(values + edges executed).
  eviction(const problem& p, std::span<const index_t> order)
      : p_(p), order_(order), uses_(p.values().size()), made_(p.values().size()) {
    for (std::size_t k = 0; k < order.size(); ++k) {
      for (auto v : p.operations()[order[k]].inputs) uses_[v].push_back(k);
      for (auto v : p.operations()[order[k]].outputs) made_[v].push_back(k);
    }
    for (auto v : p.targets()) uses_[v].push_back(order.size() + 1);  // after what is computed at the end
    for (index_t v = 0; v < p.values().size(); ++v) lossy_ = lossy_ || (p.is_source(v) && !p.values()[v].held);
    for (const auto& op : p.operations()) lossy_ = lossy_ || op.once;
  }

  /// @param budget bytes
  /// @param o      the score
  /// @param stop   polled now and then; true gives up
  /// @return an order whose memory need is within the budget, or nothing
  /// Complexity: O(evictions * values on the device + edges executed).
  std::optional<std::vector<index_t>> run(bytes_t budget, const options& o, const std::function<bool()>& stop = {}) {
    start(budget, o);
    for (now_ = 0; now_ < order_.size(); ++now_) {
      if (now_ % 64 == 0 && stop && stop()) return std::nullopt;
      const auto& outputs = p_.operations()[order_[now_]].outputs;
      const bool useless = std::all_of(outputs.begin(), outputs.end(), [&](index_t v) { return on_device_[v] || !alive(v); });
      if (useless) {
        release(p_.operations()[order_[now_]].inputs);
      } else if (!compute(order_[now_])) {
        return std::nullopt;
      }
      if (!kept_.empty()) release(std::exchange(kept_, {}));
    }
    const auto& targets = p_.targets();
    for (std::size_t i = 0; i < targets.size();) {
      if (on_device_[targets[i]]) {
        ++i;
        continue;
      }
      if (p_.is_source(targets[i]) || !compute(p_.producer(targets[i]))) return std::nullopt;
      i = 0;  // that may have evicted others
    }
    return prune_order(p_, result_);
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();

  void start(bytes_t budget, const options& o) {
    budget_ = budget;
    options_ = o;
    now_ = 0;
    result_.clear();
    device_.clear();
    kept_.clear();
    missing_.clear();
    live_ = 0;
    on_device_.assign(p_.values().size(), false);
    place_.assign(p_.values().size(), 0);
    locks_.assign(p_.values().size(), 0);
    use_at_.assign(p_.values().size(), 0);
    made_at_.assign(p_.values().size(), 0);
    has_run_.assign(p_.operations().size(), false);
    mark_.assign(p_.operations().size(), 0);
    for (index_t v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && (p_.values()[v].held || !uses_[v].empty())) put(v);
  }

  void put(index_t v) {
    if (on_device_[v]) return;
    on_device_[v] = true;
    live_ += p_.values()[v].bytes;
    place_[v] = device_.size();
    device_.push_back(v);
  }
  void take(index_t v) {
    on_device_[v] = false;
    live_ -= p_.values()[v].bytes;
    place_[device_.back()] = place_[v];
    device_[place_[v]] = device_.back();
    device_.pop_back();
  }

  /// Position of the next use of `v` after the current one; more than the length of the order + 1 if there is none.
  std::size_t next_use(index_t v) {
    auto& at = use_at_[v];
    while (at < uses_[v].size() && uses_[v][at] <= now_) ++at;
    return at < uses_[v].size() ? uses_[v][at] : order_.size() + 2;
  }
  /// Is `v`, as it is now, read after the current position?
  bool alive(index_t v) {
    const auto use = next_use(v);
    if (use > order_.size() + 1) return false;
    auto& at = made_at_[v];
    while (at < made_[v].size() && made_[v][at] <= now_) ++at;
    return at == made_[v].size() || made_[v][at] >= use;
  }

  /// The operations to compute for `v`, given what is on the device, ascending; false if that cannot be done any more.
  bool closure(index_t v, std::vector<index_t>& ops) {
    ops.clear();
    if (p_.is_source(v)) return false;
    ++stamp_;
    mark_[p_.producer(v)] = stamp_;
    ops.push_back(p_.producer(v));
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const auto& op = p_.operations()[ops[i]];
      if (op.once && has_run_[ops[i]]) return false;
      for (auto u : op.inputs) {
        if (on_device_[u]) continue;
        if (p_.is_source(u)) return false;
        const auto maker = p_.producer(u);
        if (mark_[maker] == stamp_) continue;
        mark_[maker] = stamp_;
        ops.push_back(maker);
      }
    }
    return true;
  }
  double cost(index_t v) {
    if (!closure(v, scratch_)) return never;
    double sum = 0;
    for (auto o : scratch_) sum += p_.operations()[o].seconds;
    return sum;
  }

  /// Drops those of `values` that are read no more.
  void release(const std::vector<index_t>& values) {
    for (auto v : values) {
      if (!on_device_[v] || locks_[v] > 0 || p_.values()[v].held || alive(v)) continue;
      if (lossy_ && cost(v) == never && last_resort(v)) {
        kept_.push_back(v);
        continue;
      }
      take(v);
    }
  }
  /// Would the loss of `v` make a value that is missing and still needed impossible to compute?
  bool last_resort(index_t v) {
    on_device_[v] = false;
    std::erase_if(missing_, [&](index_t w) { return on_device_[w] || !alive(w); });
    const bool needed = std::any_of(missing_.begin(), missing_.end(), [&](index_t w) { return cost(w) == never; });
    on_device_[v] = true;
    return needed;
  }

  /// Computes `o` and before it what it lacks.
  bool compute(index_t o) {
    if (p_.operations()[o].once && has_run_[o]) return false;
    std::vector<index_t> list = {o}, more;
    for (auto v : p_.operations()[o].inputs) {
      if (on_device_[v]) continue;
      if (!closure(v, more)) return false;
      list.insert(list.end(), more.begin(), more.end());
    }
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    for (auto x : list)
      for (auto v : p_.operations()[x].inputs) ++locks_[v];
    bool done = true;
    for (auto x : list) {
      const auto& op = p_.operations()[x];
      done = done && make_room(op);
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

  bool make_room(const operation& op) {
    bytes_t need = op.workspace;
    for (auto v : op.outputs) need += p_.values()[v].bytes;
    while (live_ + need > budget_) {
      index_t worst = none;
      double highest = -1;
      for (auto v : device_) {
        if (locks_[v] > 0 || p_.values()[v].held || p_.values()[v].bytes == 0 || p_.is_source(v)) continue;
        const auto distance = static_cast<double>(next_use(v) - now_);
        const double gain = static_cast<double>(p_.values()[v].bytes) * std::pow(distance, options_.distance);
        if (gain / (p_.operations()[p_.producer(v)].seconds + 1e-30) <= highest)
          continue;  // missing operands only add to the cost
        on_device_[v] = false;
        const auto again = cost(v);
        on_device_[v] = true;
        if (again == never) continue;
        const double score = gain / (again + 1e-30);
        if (score > highest) highest = score, worst = v;
      }
      if (worst == none) return false;
      take(worst);
      missing_.push_back(worst);
    }
    return true;
  }
  const problem& p_;
  std::span<const index_t> order_;
  std::vector<std::vector<std::size_t>> uses_, made_;  // positions in the order, per value
  bool lossy_ = false;                                 // are there values that cannot be made again?
  bytes_t budget_ = 0, live_ = 0;
  options options_;
  std::size_t now_ = 0;
  std::vector<index_t> result_, device_, kept_, missing_, scratch_;
  std::vector<bool> on_device_, has_run_;
  std::vector<std::size_t> place_, use_at_, made_at_;
  std::vector<unsigned> locks_, mark_;
  unsigned stamp_ = 0;
};

}  // namespace remat
