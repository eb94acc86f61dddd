// SPDX-License-Identifier: Apache-2.0
/// @file
/// An order of computations whose memory is kept up to date while it changes.
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

/// An order of computations under change: steps are inserted and removed, and the memory at every step follows. What changed
/// since the last `commit` can be taken back.
///
/// Any order in which every operation comes after the first computation of its operands is valid: what is not computed again is
/// retained. A value is on the device from a computation to its last use before the next one, as with `with_drops`.
///
/// Steps have numbers that stay, and stand in *slots*, some of which are empty, so that an insertion moves few others. A value is
/// an ascending list of *events*, the steps that make or use it; two steps stand for what is before and after all others, and
/// make the sources and use the targets.
///
/// Complexity: inserting or removing a step takes O(operands (events of the value + block + slots / block)).
class sequence {
 public:
  using step = std::uint32_t;
  using slot = std::size_t;
  static constexpr step nothing = std::numeric_limits<step>::max();
  static constexpr step start = 0, end = 1;  ///< before and after all others

  /// @param p must outlive this
  explicit sequence(const problem& p) : p_(p), events_(p.values().size()), inputs_(p.operations().size()) {
    for (operation_id o = 0; o < inputs_.size(); ++o)
      for (auto v : p.operations()[o].inputs)
        if (!p.values()[v].held) inputs_[o].push_back(v);
  }

  /// Starts from a valid order; computations that nobody reads are left out. Complexity: O(values + edges executed + slots).
  void load(std::span<const operation_id> order) {
    const auto kept = prune_order(p_, order);
    operation_.assign(2, none);
    for (auto o : kept) operation_.push_back(o);
    seconds_ = 0;
    std::vector<step> steps;
    for (std::size_t k = 0; k < kept.size(); ++k) steps.push_back(static_cast<step>(k + 2)), seconds_ += cost(steps.back());
    slot_.assign(operation_.size(), 0);
    free_.clear();
    changes_.clear();
    removed_ = 0;
    spread(steps);
  }

  std::vector<operation_id> order() const {
    std::vector<operation_id> list;
    for (auto s : at_)
      if (s != nothing && s > end) list.push_back(operation_[s]);
    return list;
  }
  double seconds() const { return seconds_; }  ///< of all steps, s; rounding errors of the changes add up
  /// Number of steps. Complexity: O(1).
  std::size_t size() const { return operation_.size() - 2 - free_.size() - removed_; }
  /// Bytes needed, if every value is dropped as early as possible.
  bytes_t peak() const { return std::max(p_.source_bytes(), memory_.peak()); }

  std::size_t slots() const { return at_.size(); }
  step at(slot k) const { return at_[k]; }  ///< `nothing` where it is empty
  slot where(step s) const { return slot_[s]; }
  operation_id operation(step s) const { return operation_[s]; }
  /// Bytes at each slot.
  const slot_memory& memory() const { return memory_; }

  /// The steps that make or use a value that is not held, ascending.
  const std::vector<step>& events(value_id v) const { return events_[v]; }
  bool makes(step s, value_id v) const { return s == start || (s != end && operation_[s] == p_.producer(v)); }
  /// The first event of `v` at slot k or later: an index into `events(v)`.
  std::size_t event_from(value_id v, slot k) const {
    const auto& list = events_[v];
    std::size_t low = 0, high = list.size();
    while (low < high) {
      const auto middle = (low + high) / 2;
      slot_[list[middle]] < k ? low = middle + 1 : high = middle;
    }
    return low;
  }
  /// Does event i of `v` exist and use what the event before it made or used?
  bool uses(value_id v, std::size_t i) const { return i < events_[v].size() && !makes(events_[v][i], v); }
  /// Is this the first computation of its operation?
  bool is_first(step s) const { return events_[p_.operations()[operation_[s]].outputs[0]].front() == s; }
  /// Operands that are not held.
  const std::vector<value_id>& inputs(operation_id o) const { return inputs_[o]; }

  /// Computes `o` just before `next`, and removes what nobody reads then. `o` has been computed before.
  void insert(operation_id o, step next) {
    step s;
    if (free_.empty()) {
      s = static_cast<step>(operation_.size());
      operation_.push_back(o);
      slot_.push_back(0);
    } else {
      s = free_.back();
      free_.pop_back();
      operation_[s] = o;
    }
    seconds_ += cost(s);
    place(s, next);
    changes_.push_back({s, next, change::inserted});
    suspect(p_.operations()[o].outputs, s);
    prune();
  }
  /// Takes out a step that is not the first of its operation, and what nobody reads then.
  void remove(step s) {
    take_out(s);
    prune();
  }
  /// Puts a step just before `next`, where it must be valid.
  void move(step s, step next) {
    const auto before = after(s);
    lift(s);
    place(s, next);
    changes_.push_back({s, before, change::moved});
  }
  /// Keeps all changes.
  void commit() {
    for (const auto& c : changes_)
      if (c.what == change::removed) free_.push_back(c.s);
    changes_.clear();
    removed_ = 0;
  }
  /// The number of changes since the last `commit` or `load`, for `roll_back`.
  std::size_t changes() const { return changes_.size(); }
  /// Takes back all changes but the first `kept` since the last `commit` or `load`.
  void roll_back(std::size_t kept = 0) {
    for (; changes_.size() > kept; changes_.pop_back()) {
      const auto [s, next, what] = changes_.back();
      if (what != change::removed) lift(s);
      if (what != change::inserted) place(s, next);
      if (what == change::inserted) seconds_ -= cost(s), free_.push_back(s);
      if (what == change::removed) seconds_ += cost(s), --removed_;
    }
  }

 private:
  static constexpr std::size_t block = slot_memory::block;
  static constexpr bytes_t empty = slot_memory::empty;
  struct change {
    step s, next;  ///< a step, and before which it stood
    enum { inserted, removed, moved } what;
  };

  double cost(step s) const { return p_.operations()[operation_[s]].seconds; }

  /// Puts the steps, ascending, into new slots, each after an empty one.
  void spread(const std::vector<step>& steps) {
    const auto count = (2 * steps.size() + 2 + block) / block * block;
    at_.assign(count, nothing);
    std::vector<bytes_t> memory(count, p_.held_bytes() - empty);
    for (auto& list : events_) list.clear();
    at_[0] = start, slot_[start] = 0;
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && !p_.values()[v].held) events_[v].push_back(start);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto s = steps[i];
      slot_[s] = 2 * i + 2;
      at_[slot_[s]] = s;
      memory[slot_[s]] += empty + p_.operations()[operation_[s]].workspace;
      for (auto v : inputs_[operation_[s]]) events_[v].push_back(s);
      for (auto v : p_.operations()[operation_[s]].outputs) events_[v].push_back(s);
    }
    at_[count - 1] = end, slot_[end] = count - 1;
    for (auto v : p_.targets())
      if (!p_.values()[v].held) events_[v].push_back(end);
    std::vector<bytes_t> difference(count + 1, 0);
    for (value_id v = 0; v < p_.values().size(); ++v) {
      const auto bytes = p_.values()[v].bytes;
      const auto& list = events_[v];
      for (std::size_t i = 0; i < list.size();) {
        auto last = i;
        while (uses(v, last + 1)) ++last;
        if (list[i] != start || last > i) difference[slot_[list[i]]] += bytes, difference[slot_[list[last]] + 1] -= bytes;
        i = last + 1;
      }
    }
    bytes_t live = 0;
    for (slot k = 0; k < count; ++k) memory[k] += live += difference[k];
    memory_.load(std::move(memory));
  }

  /// What the bytes of `v` are on the device for longer with a step at slot k, or, with `bytes` below 0, no longer without it.
  /// @param e    the first event of `v` behind slot k; the step is none
  /// @param made does the step make `v`? otherwise it reads it
  void extend(value_id v, std::size_t e, slot k, bool made, bytes_t bytes) {
    const bool used = uses(v, e);
    if (!made) {
      if (!used) memory_.add(bytes, slot_[events_[v][e - 1]] + 1, k + 1);
    } else if (!used) {
      memory_.add(bytes, k, k + 1);
    } else if (e > 0) {
      memory_.add(-bytes, slot_[events_[v][e - 1]] + 1, k);
    } else {
      memory_.add(bytes, k, slot_[events_[v][0]]);
    }
  }
  /// Calls `visit(value, whether it is made)` for what a step reads, but held values, and makes.
  template <class Visit>
  void each_value(step s, const Visit& visit) const {
    for (auto v : inputs_[operation_[s]]) visit(v, false);
    for (auto v : p_.operations()[operation_[s]].outputs) visit(v, true);
  }
  /// Puts a step that stands nowhere into a slot just before `next`.
  void place(step s, step next) {
    const auto k = slot_[s] = make_room(next);
    at_[k] = s;
    memory_.add(empty + p_.operations()[operation_[s]].workspace, k, k + 1);
    each_value(s, [&](value_id v, bool made) {
      const auto e = event_from(v, k);
      extend(v, e, k, made, p_.values()[v].bytes);
      events_[v].insert(events_[v].begin() + static_cast<std::ptrdiff_t>(e), s);
    });
  }
  /// The inverse of `place`.
  void lift(step s) {
    const auto k = slot_[s];
    each_value(s, [&](value_id v, bool made) {
      const auto e = event_from(v, k);
      events_[v].erase(events_[v].begin() + static_cast<std::ptrdiff_t>(e));
      extend(v, e, k, made, -p_.values()[v].bytes);
    });
    memory_.add(-empty - p_.operations()[operation_[s]].workspace, k, k + 1);
    at_[k] = nothing;
  }
  /// The step after s.
  step after(step s) const {
    auto k = slot_[s] + 1;
    while (at_[k] == nothing) {
      const bool bare = k % block == 0 && k + block <= slot_[end] && memory_.is_bare(k);
      k += bare ? block : 1;  // holes may be long
    }
    return at_[k];
  }
  /// Takes out a step. Those that made what it reads may be of no use then.
  void take_out(step s) {
    changes_.push_back({s, after(s), change::removed});
    seconds_ -= cost(s);
    ++removed_;
    lift(s);
    suspect(inputs_[operation_[s]], s);
  }
  /// Whoever made or used `values` last before `s` may be of no use now. The first value's comes first of them.
  void suspect(const std::vector<value_id>& values, step s) {
    for (auto v = values.rbegin(); v != values.rend(); ++v)
      if (const auto e = event_from(*v, slot_[s]); e > 0) suspects_.push_back(events_[*v][e - 1]);
  }
  /// Takes out those suspects whose results nobody reads, and what then nobody reads.
  void prune() {
    while (!suspects_.empty()) {
      const auto s = suspects_.back();
      suspects_.pop_back();
      if (s <= end || at_[slot_[s]] != s) continue;
      const auto& outputs = p_.operations()[operation_[s]].outputs;
      if (std::none_of(outputs.begin(), outputs.end(), [&](value_id v) { return uses(v, event_from(v, slot_[s]) + 1); }))
        take_out(s);
    }
  }
  /// An empty slot just before `next`; those before it move if there is none.
  slot make_room(step next) {
    const auto k = slot_[next];
    if (at_[k - 1] == nothing) {
      auto low = k - 1;
      while (at_[low - 1] == nothing) --low;
      return low + (k - low) / 2;
    }
    auto hole = k - 1;
    while (hole > 0 && k - hole < 256 && at_[hole] != nothing) --hole;
    if (hole == 0 || at_[hole] != nothing) {
      for (std::size_t width = 1024; width < at_.size(); width *= 2)
        if (const auto room = spread_part(width, k)) return room;
      std::vector<step> steps;
      for (auto s : at_)
        if (s != nothing && s > end) steps.push_back(s);
      spread(steps);
      return make_room(next);
    }
    for (; hole + 1 < k; ++hole) shift_down(hole + 1);
    return k - 1;
  }
  /// Spreads the steps of a part of the slots, with an empty slot just before slot k, where a step stands. Larger parts
  /// have to be emptier: so an insertion moves O(log(slots)^2) steps on average, even if all are at one place.
  /// @param width of the part, which slot k - 1 is in: slots, a power of two, fewer than there are
  /// @return the empty slot; 0 if the part is too full
  slot spread_part(std::size_t width, slot k) {
    const auto begin = std::min((k - 1) / width * width, at_.size() - width);
    const auto first = std::max<slot>(1, begin), stop = std::min(slot_[end], begin + width);
    struct moved {
      step s;
      bytes_t memory, after;  ///< at its slot, and in an empty one behind it
    };
    std::vector<moved> steps;
    std::size_t before = 0;  // of them, those before slot k
    for (auto j = first; j < stop; ++j)
      if (at_[j] != nothing) before += j < k, steps.push_back({at_[j], memory_.at(j), memory_.at(j) - ends_after(j) - empty});
    const auto share = static_cast<double>(steps.size() + 1) / static_cast<double>(stop - first);
    if (before == 0 || share > 1 - 0.25 * std::log2(width) / std::log2(at_.size())) return 0;
    const auto target = [&](std::size_t i) { return first + i * (stop - first) / (steps.size() + 1); };
    std::fill(at_.begin() + static_cast<std::ptrdiff_t>(first), at_.begin() + static_cast<std::ptrdiff_t>(stop), nothing);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto from = target(i < before ? i : i + 1),
                 to = i + 1 == steps.size() ? stop : target(i + 1 < before ? i + 1 : i + 2);
      at_[from] = steps[i].s;
      slot_[steps[i].s] = from;
      for (auto j = from; j < to; ++j) memory_.set(j, j == from ? steps[i].memory : steps[i].after);
    }
    memory_.settle(first, stop);
    return target(before);
  }
  /// Bytes at slot k that are not on the device after it.
  bytes_t ends_after(slot k) const {
    bytes_t ends = p_.operations()[operation_[at_[k]]].workspace;
    each_value(at_[k], [&](value_id v, bool) {
      if (!uses(v, event_from(v, k) + 1)) ends += p_.values()[v].bytes;
    });
    return ends;
  }
  /// Moves the step in slot k to k - 1, which is empty.
  void shift_down(slot k) {
    const auto s = at_[k];
    memory_.set(k - 1, memory_.at(k));
    memory_.set(k, memory_.at(k) - ends_after(k) - empty);
    at_[k - 1] = s;
    at_[k] = nothing;
    slot_[s] = k - 1;
    memory_.settle(k - 1, k + 1);
  }

  const problem& p_;
  std::vector<std::vector<step>> events_;      // per value
  std::vector<std::vector<value_id>> inputs_;  // per operation
  std::vector<operation_id> operation_;        // per step
  std::vector<slot> slot_;                     // per step
  std::vector<step> at_;                       // per slot
  slot_memory memory_;
  std::vector<step> free_;
  std::vector<step> suspects_;  // of being of no use; empty between calls
  std::vector<change> changes_;
  std::size_t removed_ = 0;  // steps that stand nowhere, but may come back
  double seconds_ = 0;
};

}  // namespace remat::order
