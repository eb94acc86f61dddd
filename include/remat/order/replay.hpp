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

/// Computes what is needed up to each of several moments, forgets there what is not to be retained, goes on and computes what is
/// missing when it is needed.
/// @param p        the problem
/// @param moments  needed operations, ascending, each an ancestor of the next
/// @param retained per moment and value: on the device just before the moment runs first; its operands and sources are in any
/// case
/// @param free     per value: kept once made, and made as soon as that takes nothing else; empty: none is
/// @return the order, or nothing if a once-only operation would have to run again
/// Complexity: O(moments (values + edges) + edges executed).
inline std::optional<std::vector<operation_id>> replay(const problem& p, const std::vector<operation_id>& moments,
                                                       const std::vector<std::vector<bool>>& retained,
                                                       const std::vector<bool>& free = {}) {
  const auto& ops = p.operations();
  const auto needed = free.empty() ? std::vector<operation_id>() : needed_operations(p);
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
    if (free.empty()) return list;
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
    const bool end = j == moments.size();
    std::vector<value_id> wanted = end ? p.targets() : ops[moments[j]].inputs;
    for (value_id v = 0; !end && v < there.size(); ++v)
      if (retained[j][v] && (free.empty() || !free[v])) wanted.push_back(v);
    // First runs in the order of the problem, each preceded by what it lacks, those from before the last moment where they are
    // lacked; then what is to be retained and was lost.
    for (auto o : add_free(missing.for_values(wanted, there), end ? operation_id(none) : moments[j]))
      if (!has_run[o] && (j == 0 || o > moments[j - 1]) && !run(missing.for_operation(o, there))) return std::nullopt;
    if (!run(missing.for_values(wanted, there))) return std::nullopt;
    if (end) break;
    const auto& operands = ops[moments[j]].inputs;
    for (value_id v = 0; v < there.size(); ++v)
      there[v] = there[v] && (p.is_source(v) || retained[j][v] || (!free.empty() && free[v]) ||
                              std::binary_search(operands.begin(), operands.end(), v));
    if (!run({moments[j]})) return std::nullopt;
  }
  return prune_order(p, order);
}

}  // namespace remat::order
