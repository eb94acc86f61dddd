// SPDX-License-Identifier: Apache-2.0
/// @file
/// An order of computations that updates its memory incrementally.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/order/slot_memory.hpp>

namespace remat::order {

/// An order of computations that changes step by step. Inserting, removing or moving a step updates the memory at every step.
/// Changes since the last `commit` can be undone.
///
/// An order is valid if every operation comes after the first computation of each of its operands. A value is retained unless it
/// is computed again. It is on the device from a computation to its last use before the next computation, as with `with_drops`.
///
/// A step has a permanent number and stands in a *slot*. Some slots are empty, so that an insertion moves few steps. Each value
/// has an ascending list of *events*, the steps that make or use the value. The step `start` makes the sources, the step `end`
/// uses the targets.
///
/// Complexity: inserting or removing a step takes O(operands (events of the value + block + slots / block)).
class sequence {
 public:
  using step = std::uint32_t;
  using slot = std::size_t;
  static constexpr step no_step = std::numeric_limits<step>::max();
  static constexpr step start = 0, end = 1;  ///< steps before and after all others

  /// @param p the problem; must outlive this object
  explicit sequence(const problem& p) : p_(p), events_(p.values().size()), inputs_(p.operations().size()) {
    for (operation_id o = 0; o < inputs_.size(); ++o)
      for (auto v : p.operations()[o].inputs)
        if (!p.values()[v].held) inputs_[o].push_back(v);
  }

  /// Starts from a valid order; leaves out computations whose outputs nobody reads.
  /// Complexity: O(values + edges executed + slots).
  void load(std::span<const operation_id> order) {
    const auto kept = prune_order(p_, order);
    operation_of_.assign(2, none);
    for (auto o : kept) operation_of_.push_back(o);
    seconds_ = 0;
    std::vector<step> steps;
    for (std::size_t k = 0; k < kept.size(); ++k) steps.push_back(static_cast<step>(k + 2)), seconds_ += cost(steps.back());
    slot_of_.assign(operation_of_.size(), 0);
    free_steps_.clear();
    changes_.clear();
    removed_ = 0;
    lay_out(steps);
  }

  std::vector<operation_id> order() const {
    std::vector<operation_id> list;
    for (auto s : step_at_)
      if (s != no_step && s > end) list.push_back(operation_of_[s]);
    return list;
  }
  double seconds() const { return seconds_; }  ///< of all steps, s; rounding errors accumulate over changes
  /// Number of steps. Complexity: O(1).
  std::size_t size() const { return operation_of_.size() - 2 - free_steps_.size() - removed_; }
  /// Peak if every value is dropped as early as possible, bytes.
  bytes_t peak() const { return std::max(p_.source_bytes(), memory_.peak()); }

  std::size_t slots() const { return step_at_.size(); }
  step step_at(slot k) const { return step_at_[k]; }  ///< `no_step` if the slot is empty
  slot slot_of(step s) const { return slot_of_[s]; }
  operation_id operation(step s) const { return operation_of_[s]; }
  /// Memory at each slot, bytes.
  const slot_memory& memory() const { return memory_; }

  /// The steps that make or use `v`, ascending; empty if `v` is held.
  const std::vector<step>& events(value_id v) const { return events_[v]; }
  bool makes(step s, value_id v) const { return s == start || (s != end && operation_of_[s] == p_.producer(v)); }
  /// The first event of `v` at slot k or later: an index into `events(v)`.
  std::size_t event_from(value_id v, slot k) const {
    const auto& list = events_[v];
    std::size_t low = 0, high = list.size();
    while (low < high) {
      const auto middle = (low + high) / 2;
      slot_of_[list[middle]] < k ? low = middle + 1 : high = middle;
    }
    return low;
  }
  /// True if event i of `v` exists and uses the value that the previous event made or used.
  bool uses(value_id v, std::size_t i) const { return i < events_[v].size() && !makes(events_[v][i], v); }
  /// True if `s` is the first computation of its operation.
  bool is_first(step s) const { return events_[p_.operations()[operation_of_[s]].outputs[0]].front() == s; }
  /// Operands that are not held.
  const std::vector<value_id>& inputs(operation_id o) const { return inputs_[o]; }

  /// Computes `o`, which has been computed before, again just before `next`. Then removes the computations that became useless.
  void insert(operation_id o, step next) {
    step s;
    if (free_steps_.empty()) {
      s = static_cast<step>(operation_of_.size());
      operation_of_.push_back(o);
      slot_of_.push_back(0);
    } else {
      s = free_steps_.back();
      free_steps_.pop_back();
      operation_of_[s] = o;
    }
    seconds_ += cost(s);
    place(s, next);
    changes_.push_back({s, next, change::inserted});
    mark_suspects(p_.operations()[o].outputs, s);
    prune();
  }
  /// Removes a step that is not the first of its operation, and the computations that became useless.
  void remove(step s) {
    remove_one(s);
    prune();
  }
  /// Moves a step to just before `next`, where it must be valid.
  void move(step s, step next) {
    const auto before = step_after(s);
    unplace(s);
    place(s, next);
    changes_.push_back({s, before, change::moved});
  }
  /// Accepts all changes.
  void commit() {
    for (const auto& c : changes_)
      if (c.what == change::removed) free_steps_.push_back(c.s);
    changes_.clear();
    removed_ = 0;
  }
  /// The number of changes since the last `commit` or `load`, an argument of `roll_back`.
  std::size_t changes() const { return changes_.size(); }
  /// Undoes all changes since the last `commit` or `load` except the first `kept`.
  void roll_back(std::size_t kept = 0) {
    for (; changes_.size() > kept; changes_.pop_back()) {
      const auto [s, next, what] = changes_.back();
      if (what != change::removed) unplace(s);
      if (what != change::inserted) place(s, next);
      if (what == change::inserted) seconds_ -= cost(s), free_steps_.push_back(s);
      if (what == change::removed) seconds_ += cost(s), --removed_;
    }
  }

 private:
  static constexpr std::size_t block = slot_memory::block;
  static constexpr bytes_t empty = slot_memory::empty;
  struct change {
    step s, next;  ///< a step, and the step that it stood before
    enum { inserted, removed, moved } what;
  };

  double cost(step s) const { return p_.operations()[operation_of_[s]].seconds; }

  /// Puts the ascending steps into new slots, with an empty slot before each.
  void lay_out(const std::vector<step>& steps) {
    const auto count = (2 * steps.size() + 2 + block) / block * block;
    step_at_.assign(count, no_step);
    std::vector<bytes_t> memory(count, p_.held_bytes() - empty);
    for (auto& list : events_) list.clear();
    step_at_[0] = start, slot_of_[start] = 0;
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && !p_.values()[v].held) events_[v].push_back(start);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto s = steps[i];
      slot_of_[s] = 2 * i + 2;
      step_at_[slot_of_[s]] = s;
      memory[slot_of_[s]] += empty + p_.operations()[operation_of_[s]].workspace;
      for (auto v : inputs_[operation_of_[s]]) events_[v].push_back(s);
      for (auto v : p_.operations()[operation_of_[s]].outputs) events_[v].push_back(s);
    }
    step_at_[count - 1] = end, slot_of_[end] = count - 1;
    for (auto v : p_.targets())
      if (!p_.values()[v].held) events_[v].push_back(end);
    std::vector<bytes_t> difference(count + 1, 0);
    for (value_id v = 0; v < p_.values().size(); ++v) {
      const auto bytes = p_.values()[v].bytes;
      const auto& list = events_[v];
      for (std::size_t i = 0; i < list.size();) {
        auto last = i;
        while (uses(v, last + 1)) ++last;
        if (list[i] != start || last > i) difference[slot_of_[list[i]]] += bytes, difference[slot_of_[list[last]] + 1] -= bytes;
        i = last + 1;
      }
    }
    bytes_t live = 0;
    for (slot k = 0; k < count; ++k) memory[k] += live += difference[k];
    memory_.load(std::move(memory));
  }

  /// Adds `bytes` to the slots where `v` is live because of a step at slot k. Negative `bytes` undo this.
  /// @param e    first event of `v` behind slot k, without the step itself
  /// @param made true if the step makes `v`; false if it reads `v`
  void add_live_bytes(value_id v, std::size_t e, slot k, bool made, bytes_t bytes) {
    const bool used = uses(v, e);
    if (!made) {
      if (!used) memory_.add(bytes, slot_of_[events_[v][e - 1]] + 1, k + 1);
    } else if (!used) {
      memory_.add(bytes, k, k + 1);
    } else if (e > 0) {
      memory_.add(-bytes, slot_of_[events_[v][e - 1]] + 1, k);
    } else {
      memory_.add(bytes, k, slot_of_[events_[v][0]]);
    }
  }
  /// Calls `visit(value, made)` for the inputs of a step that are not held (made = false) and for its outputs (made = true).
  template <class Visit>
  void each_value(step s, const Visit& visit) const {
    for (auto v : inputs_[operation_of_[s]]) visit(v, false);
    for (auto v : p_.operations()[operation_of_[s]].outputs) visit(v, true);
  }
  /// Puts a step that has no slot into a slot just before `next`.
  void place(step s, step next) {
    const auto k = slot_of_[s] = empty_slot_before(next);
    step_at_[k] = s;
    memory_.add(empty + p_.operations()[operation_of_[s]].workspace, k, k + 1);
    each_value(s, [&](value_id v, bool made) {
      const auto e = event_from(v, k);
      add_live_bytes(v, e, k, made, p_.values()[v].bytes);
      events_[v].insert(events_[v].begin() + static_cast<std::ptrdiff_t>(e), s);
    });
  }
  /// The inverse of `place`.
  void unplace(step s) {
    const auto k = slot_of_[s];
    each_value(s, [&](value_id v, bool made) {
      const auto e = event_from(v, k);
      events_[v].erase(events_[v].begin() + static_cast<std::ptrdiff_t>(e));
      add_live_bytes(v, e, k, made, -p_.values()[v].bytes);
    });
    memory_.add(-empty - p_.operations()[operation_of_[s]].workspace, k, k + 1);
    step_at_[k] = no_step;
  }
  /// The step after s.
  step step_after(step s) const {
    auto k = slot_of_[s] + 1;
    while (step_at_[k] == no_step) {
      const bool empty_block = k % block == 0 && k + block <= slot_of_[end] && memory_.is_empty_block(k);
      k += empty_block ? block : 1;  // runs of empty slots may be long
    }
    return step_at_[k];
  }
  /// Removes a step. The steps that made its inputs may become useless.
  void remove_one(step s) {
    changes_.push_back({s, step_after(s), change::removed});
    seconds_ -= cost(s);
    ++removed_;
    unplace(s);
    mark_suspects(inputs_[operation_of_[s]], s);
  }
  /// Marks the last steps before `s` that made or used `values` as suspects: they may be useless. `prune` looks at the first
  /// value first.
  void mark_suspects(const std::vector<value_id>& values, step s) {
    for (auto v = values.rbegin(); v != values.rend(); ++v)
      if (const auto e = event_from(*v, slot_of_[s]); e > 0) suspects_.push_back(events_[*v][e - 1]);
  }
  /// Removes the suspects whose outputs nobody reads, and steps that become useless by that.
  void prune() {
    while (!suspects_.empty()) {
      const auto s = suspects_.back();
      suspects_.pop_back();
      if (s <= end || step_at_[slot_of_[s]] != s) continue;
      const auto& outputs = p_.operations()[operation_of_[s]].outputs;
      if (std::none_of(outputs.begin(), outputs.end(), [&](value_id v) { return uses(v, event_from(v, slot_of_[s]) + 1); }))
        remove_one(s);
    }
  }
  /// An empty slot just before `next`. Steps before it move if there is none.
  slot empty_slot_before(step next) {
    const auto k = slot_of_[next];
    if (step_at_[k - 1] == no_step) {
      auto low = k - 1;
      while (step_at_[low - 1] == no_step) --low;
      return low + (k - low) / 2;
    }
    auto hole = k - 1;
    while (hole > 0 && k - hole < 256 && step_at_[hole] != no_step) --hole;
    if (hole == 0 || step_at_[hole] != no_step) {
      for (std::size_t width = 1024; width < step_at_.size(); width *= 2)
        if (const auto room = spread_slots(width, k)) return room;
      std::vector<step> steps;
      for (auto s : step_at_)
        if (s != no_step && s > end) steps.push_back(s);
      lay_out(steps);
      return empty_slot_before(next);
    }
    for (; hole + 1 < k; ++hole) shift_down(hole + 1);
    return k - 1;
  }
  /// Spreads the steps of a part of the slots, and leaves an empty slot just before slot k, where a step stands. The larger the
  /// part, the emptier it has to be. So an insertion moves O(log(slots)^2) steps on average, even if all insertions are at one
  /// place.
  /// @param width slots of the part, which contains slot k - 1: a power of two below the number of slots
  /// @param k     a slot with a step
  /// @return the empty slot; 0 if the part is too full
  slot spread_slots(std::size_t width, slot k) {
    const auto begin = std::min((k - 1) / width * width, step_at_.size() - width);
    const auto first = std::max<slot>(1, begin), stop = std::min(slot_of_[end], begin + width);
    struct moved {
      step s;
      bytes_t memory, after;  ///< bytes at the slot of the step, and at an empty slot behind it
    };
    std::vector<moved> steps;
    std::size_t before = 0;  // number of `steps` before slot k
    for (auto j = first; j < stop; ++j)
      if (step_at_[j] != no_step)
        before += j < k, steps.push_back({step_at_[j], memory_.at(j), memory_.at(j) - bytes_freed_after(j) - empty});
    const auto share = static_cast<double>(steps.size() + 1) / static_cast<double>(stop - first);
    if (before == 0 || share > 1 - 0.25 * std::log2(width) / std::log2(step_at_.size())) return 0;
    const auto target = [&](std::size_t i) { return first + i * (stop - first) / (steps.size() + 1); };
    std::fill(step_at_.begin() + static_cast<std::ptrdiff_t>(first), step_at_.begin() + static_cast<std::ptrdiff_t>(stop),
              no_step);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto from = target(i < before ? i : i + 1),
                 to = i + 1 == steps.size() ? stop : target(i + 1 < before ? i + 1 : i + 2);
      step_at_[from] = steps[i].s;
      slot_of_[steps[i].s] = from;
      for (auto j = from; j < to; ++j) memory_.set(j, j == from ? steps[i].memory : steps[i].after);
    }
    memory_.update_maxima(first, stop);
    return target(before);
  }
  /// Bytes at slot k that are freed after its step.
  bytes_t bytes_freed_after(slot k) const {
    bytes_t freed = p_.operations()[operation_of_[step_at_[k]]].workspace;
    each_value(step_at_[k], [&](value_id v, bool) {
      if (!uses(v, event_from(v, k) + 1)) freed += p_.values()[v].bytes;
    });
    return freed;
  }
  /// Moves the step in slot k to k - 1, which is empty.
  void shift_down(slot k) {
    const auto s = step_at_[k];
    memory_.set(k - 1, memory_.at(k));
    memory_.set(k, memory_.at(k) - bytes_freed_after(k) - empty);
    step_at_[k - 1] = s;
    step_at_[k] = no_step;
    slot_of_[s] = k - 1;
    memory_.update_maxima(k - 1, k + 1);
  }

  const problem& p_;
  std::vector<std::vector<step>> events_;      // per value
  std::vector<std::vector<value_id>> inputs_;  // per operation
  std::vector<operation_id> operation_of_;     // per step
  std::vector<slot> slot_of_;                  // per step
  std::vector<step> step_at_;                  // per slot
  slot_memory memory_;
  std::vector<step> free_steps_;
  std::vector<step> suspects_;  // possibly useless; empty between calls
  std::vector<change> changes_;
  std::size_t removed_ = 0;  // steps without a slot that `roll_back` may restore
  double seconds_ = 0;
};

}  // namespace remat::order
