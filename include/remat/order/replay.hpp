// SPDX-License-Identifier: Apache-2.0
/// @file
/// Orders of computations that retain given values and make the rest again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::order {

/// Finds what has to run before values or operations can be used.
class missing_operations {
 public:
  explicit missing_operations(const problem& p) : p_(p), marked_(p.operations().size(), false) {}

  /// @param wanted values
  /// @param there  per value: on the device; sources are
  /// @return what makes those of `wanted` that are not there, and what that lacks in turn, in the order of the problem
  /// Complexity: O(k log k + edges) for k operations and their operands.
  std::vector<operation_id> for_values(std::span<const value_id> wanted, const std::vector<bool>& there) {
    std::vector<operation_id> found;
    const auto need = [&](value_id v) {
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
  std::vector<operation_id> for_operation(operation_id o, const std::vector<bool>& there) {
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
inline std::optional<std::vector<operation_id>> replay_across(const problem& p, const std::vector<operation_id>& needed,
                                                              operation_id tau, const std::vector<bool>& retained,
                                                              const std::vector<bool>& later) {
  const auto& ops = p.operations();
  std::vector<bool> there(p.values().size(), false), has_run(ops.size(), false);
  for (value_id v = 0; v < there.size(); ++v) there[v] = p.is_source(v);
  std::vector<operation_id> order;
  missing_operations missing(p);
  const auto run = [&](operation_id o) {
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
    for (operation_id o = 0; o < tau; ++o) delayed[o] = later[o] && !ancestor[o];
  }
  for (auto o : needed) {
    if (o == tau) {
      const auto& operands = ops[tau].inputs;
      for (value_id v = 0; v < there.size(); ++v)
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

/// Computes what is needed up to each of several moments, forgets there what is not to be retained, goes on and computes what is
/// missing when it is needed.
/// @param p        the problem
/// @param moments  needed operations, ascending, each an ancestor of the next
/// @param retained per moment and value: on the device just before the moment runs first; its operands are in any case
/// @param free     per value: kept once made, and made as soon as that takes nothing else
/// @return the order, or nothing if a once-only operation would have to run again
/// Complexity: O(moments (values + edges) + edges executed).
inline std::optional<std::vector<operation_id>> replay_through(const problem& p, const std::vector<operation_id>& moments,
                                                               const std::vector<std::vector<bool>>& retained,
                                                               const std::vector<bool>& free) {
  const auto& ops = p.operations();
  const auto needed = needed_operations(p);
  std::vector<bool> there(p.values().size(), false), has_run(ops.size(), false);
  for (value_id v = 0; v < there.size(); ++v) there[v] = p.is_source(v);
  std::vector<operation_id> order;
  missing_operations missing(p);
  const auto run = [&](const std::vector<operation_id>& list) {
    for (auto o : list) {
      if (ops[o].once && has_run[o]) return false;
      has_run[o] = true;
      order.push_back(o);
      for (auto v : ops[o].outputs) there[v] = true;
    }
    return true;
  };
  // Adds to the ascending `list`, all of which will run, what then is free.
  const auto add_free = [&](std::vector<operation_id> list, operation_id end) {
    std::vector<bool> listed(ops.size(), false);
    for (auto o : list) listed[o] = true;
    for (auto o : needed) {
      if (o >= end || listed[o] || has_run[o]) continue;
      listed[o] = std::all_of(ops[o].outputs.begin(), ops[o].outputs.end(), [&](value_id v) { return free[v]; }) &&
                  std::all_of(ops[o].inputs.begin(), ops[o].inputs.end(),
                              [&](value_id v) { return there[v] || (!p.is_source(v) && listed[p.producer(v)]); });
      if (listed[o]) list.push_back(o);
    }
    std::sort(list.begin(), list.end());
    return list;
  };
  for (std::size_t j = 0; j <= moments.size(); ++j) {
    std::vector<value_id> wanted = p.targets();
    if (j < moments.size()) {
      wanted = ops[moments[j]].inputs;
      for (value_id v = 0; v < there.size(); ++v)
        if (retained[j][v] && !free[v]) wanted.push_back(v);
    }
    // First runs in the order of the problem, each preceded by what it lacks; then what is to be retained and was lost.
    for (auto o : add_free(missing.for_values(wanted, there), j < moments.size() ? moments[j] : operation_id(none)))
      if (!has_run[o] && !run(missing.for_operation(o, there))) return std::nullopt;
    if (!run(missing.for_values(wanted, there))) return std::nullopt;
    if (j == moments.size()) break;
    const auto& operands = ops[moments[j]].inputs;
    for (value_id v = 0; v < there.size(); ++v)
      there[v] =
          there[v] && (p.is_source(v) || free[v] || retained[j][v] || std::binary_search(operands.begin(), operands.end(), v));
    if (!run({moments[j]})) return std::nullopt;
  }
  return prune_order(p, order);
}

}  // namespace remat::order
