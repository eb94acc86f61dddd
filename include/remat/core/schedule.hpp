// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules: what a solver returns and an executor runs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>

namespace remat {

/// Kind of a step. `evaluate` defines what each kind does.
enum class action : std::uint8_t { compute, drop, offload, prefetch, copy };

/// The names of the actions, in the order of `action`.
inline constexpr std::string_view action_names[] = {"compute", "drop", "offload", "prefetch", "copy"};
inline constexpr std::string_view to_string(action a) { return action_names[static_cast<int>(a)]; }

/// One step of a schedule: an action on an operation (`compute`) or on a value (all other actions).
struct step {
  action what = action::compute;
  tier_id from = device_tier;  ///< tier of a drop, or source of a copy; offload and prefetch ignore it
  tier_id to = device_tier;    ///< destination of a copy; offload and prefetch ignore it
  index_t which = 0;           ///< index of the operation or of the value

  constexpr step() = default;
  constexpr step(action a, index_t i, tier_id source = device_tier, tier_id destination = device_tier)
      : what(a), from(source), to(destination), which(i) {}
  operation_id operation() const { return which; }  ///< of a `compute` step
  value_id value() const { return which; }          ///< of any other step
  /// True if version 1 of the exchange format has this step: no `copy`, and no drop from another tier than the device.
  bool plain() const { return what != action::copy && from == device_tier; }
  friend bool operator==(const step&, const step&) = default;
};
static_assert(sizeof(step) == 8);

/// The start tier of a source that may start on any tier.
struct start_place {
  value_id value;
  tier_id tier;
  friend bool operator==(const start_place&, const start_place&) = default;
};

/// A list of steps, executed in order.
struct schedule {
  std::vector<step> steps;
  std::vector<start_place> starts = {};  ///< one entry for each source that may start on any tier

  void compute(operation_id operation) { steps.push_back({action::compute, operation}); }
  void drop(value_id value, tier_id from = device_tier) { steps.push_back({action::drop, value, from}); }
  void offload(value_id value) { steps.push_back({action::offload, value}); }
  void prefetch(value_id value) { steps.push_back({action::prefetch, value}); }
  void copy(value_id value, tier_id from, tier_id to) { steps.push_back({action::copy, value, from, to}); }

  /// True if version 1 of the exchange format has this schedule: it names no tier.
  bool plain() const {
    return starts.empty() && std::all_of(steps.begin(), steps.end(), [](const step& s) { return s.plain(); });
  }
  friend bool operator==(const schedule&, const schedule&) = default;
};

/// The operations that a schedule computes, in order. Drops and copies are left out.
inline std::vector<operation_id> compute_order(const schedule& s) {
  std::vector<operation_id> order;
  for (const auto& x : s.steps)
    if (x.what == action::compute) order.push_back(x.which);
  return order;
}

/// True if the schedule copies values between tiers (`offload`, `prefetch` or `copy`).
inline bool has_copies(const schedule& s) {
  return std::any_of(s.steps.begin(), s.steps.end(),
                     [](const step& x) { return x.what != action::compute && x.what != action::drop; });
}

/// The operations that at least one target depends on, ascending: the order of store-all without unneeded operations.
/// Complexity: O(values + edges).
inline std::vector<operation_id> needed_operations(const problem& p) {
  const auto& ops = p.operations();
  std::vector<bool> needed(ops.size(), false);
  for (auto v : p.targets())
    if (!p.is_source(v)) needed[p.producer(v)] = true;
  for (std::size_t o = ops.size(); o-- > 0;)
    if (needed[o])
      for (auto v : ops[o].inputs)
        if (!p.is_source(v)) needed[p.producer(v)] = true;
  std::vector<operation_id> list;
  for (operation_id o = 0; o < ops.size(); ++o)
    if (needed[o]) list.push_back(o);
  return list;
}

/// Adds drops to an order of computations. Each value that is not held leaves as early as possible: right after its last use
/// before it is computed again, and, unless it is a target, after its last use. No other drops need less memory at any step.
/// @param p     the problem
/// @param order operations in the order of their execution, any number of times each
/// @return a schedule that computes `order`; `evaluate` tells whether it is valid
/// Complexity: O(values + edges executed).
inline schedule with_drops(const problem& p, std::span<const operation_id> order) {
  schedule s;  // built backwards, then reversed
  liveness after(p);
  const auto drop = [&](const std::vector<value_id>& values) {
    for (auto v = values.rbegin(); v != values.rend(); ++v)
      if (!after.wanted(*v)) s.drop(*v);
  };
  for (std::size_t k = order.size(); k-- > 0;) {
    drop(p.operations()[order[k]].inputs);
    drop(p.operations()[order[k]].outputs);
    s.compute(order[k]);
    after.step_back(order[k]);
  }
  for (value_id v = p.values().size(); v-- > 0;)  // sources that no operation reads
    if (p.is_source(v) && !after.wanted(v)) s.drop(v);
  std::reverse(s.steps.begin(), s.steps.end());
  return s;
}

}  // namespace remat
