// SPDX-License-Identifier: Apache-2.0
/// @file
/// Orders of computations that retain given values and recompute the others.
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

/// An order under construction: the operations run so far, and the values on the device.
class order_builder {
 public:
  explicit order_builder(const problem& p)
      : p_(p), on_device_(p.values().size()), has_run_(p.operations().size(), false), visited_(p.operations().size(), false) {
    for (value_id v = 0; v < on_device_.size(); ++v) on_device_[v] = p.is_source(v);
  }

  bool on_device(value_id v) const { return on_device_[v]; }
  bool has_run(operation_id o) const { return has_run_[o]; }
  /// The operations run so far.
  const std::vector<operation_id>& order() const { return order_; }

  /// The operations that compute the missing ones of `wanted`, and their missing inputs in turn, in the order of the problem.
  /// Complexity: O(k log k + edges) for k operations and their operands.
  std::vector<operation_id> missing_operations(std::span<const value_id> wanted) {
    std::vector<operation_id> operations;
    const auto visit = [&](value_id v) {
      if (on_device_[v] || visited_[p_.producer(v)]) return;
      visited_[p_.producer(v)] = true;
      operations.push_back(p_.producer(v));
    };
    for (auto v : wanted) visit(v);
    for (std::size_t i = 0; i < operations.size(); ++i)
      for (auto v : p_.operations()[operations[i]].inputs) visit(v);
    std::sort(operations.begin(), operations.end());
    for (auto o : operations) visited_[o] = false;
    return operations;
  }
  /// Runs the operations of `missing_operations(wanted)`. @return false if a once-only operation would have to run again
  bool compute_values(std::span<const value_id> wanted) {
    const auto list = missing_operations(wanted);
    return std::all_of(list.begin(), list.end(), [&](operation_id o) { return add(o); });
  }
  /// Recomputes the missing inputs of `o`, then runs `o`. @return false if a once-only operation would have to run again
  bool run(operation_id o) { return compute_values(p_.operations()[o].inputs) && add(o); }
  /// Drops `v`, unless it is a source.
  void drop(value_id v) { on_device_[v] = p_.is_source(v); }
  /// Recomputes missing targets, then removes computations whose outputs nobody reads.
  /// @return the order, or nothing if a once-only operation would have to run again
  std::optional<std::vector<operation_id>> finish() {
    if (!compute_values(p_.targets())) return std::nullopt;
    return prune_order(p_, order_);
  }

 private:
  bool add(operation_id o) {
    const auto& op = p_.operations()[o];
    if (op.once && has_run_[o])
      return std::all_of(op.outputs.begin(), op.outputs.end(), [&](value_id v) { return on_device_[v]; });
    has_run_[o] = true;
    order_.push_back(o);
    for (auto v : op.outputs) on_device_[v] = true;
    return true;
  }

  const problem& p_;
  std::vector<bool> on_device_, has_run_, visited_;  // visited_: in the current search
  std::vector<operation_id> order_;
};

/// Makes an order from the values to retain at each of several moments. Up to a moment it computes the needed operations. There
/// it drops the values that are not retained. It recomputes a dropped value when the value is needed.
/// @param p           the problem
/// @param moments     needed operations in the order of their first runs, none before an operation that it depends on
/// @param retained    per moment and value: true if the value is on the device just before the first run of the moment. Operands
///                    of the moment and sources are there in any case
/// @param always_kept per value: true if the value is kept once computed, and computed as soon as its operation lacks no input;
///                    empty: no value is always kept
/// @return the order, or nothing if a once-only operation would have to run again
/// Complexity: O(moments (values + edges) + edges executed).
inline std::optional<std::vector<operation_id>> replay(const problem& p, const std::vector<operation_id>& moments,
                                                       const std::vector<std::vector<bool>>& retained,
                                                       const std::vector<bool>& always_kept = {}) {
  const auto& ops = p.operations();
  const auto needed = always_kept.empty() ? std::vector<operation_id>() : needed_operations(p);
  order_builder builder(p);
  // Adds to the ascending `list` the operations before `end` that have not run, whose outputs are all always kept, and whose
  // inputs are on the device or made by operations of the list.
  const auto add_always_kept = [&](std::vector<operation_id> list, operation_id end) {
    if (always_kept.empty()) return list;
    std::vector<bool> listed(ops.size(), false);
    for (auto o : list) listed[o] = true;
    for (auto o : needed) {
      if (o >= end || listed[o] || builder.has_run(o)) continue;
      listed[o] = std::all_of(ops[o].outputs.begin(), ops[o].outputs.end(), [&](value_id v) { return always_kept[v]; }) &&
                  std::all_of(ops[o].inputs.begin(), ops[o].inputs.end(),
                              [&](value_id v) { return builder.on_device(v) || listed[p.producer(v)]; });
      if (listed[o]) list.push_back(o);
    }
    std::sort(list.begin(), list.end());
    return list;
  };
  for (std::size_t j = 0; j <= moments.size(); ++j) {
    const bool end = j == moments.size();
    std::vector<value_id> wanted = end ? p.targets() : ops[moments[j]].inputs;
    for (value_id v = 0; !end && v < p.values().size(); ++v)
      if (retained[j][v] && (always_kept.empty() || !always_kept[v])) wanted.push_back(v);
    // First runs come in the order of the problem, each preceded by its missing inputs. Operations before the last moment run
    // only where an input is missing. Lost values that have to be retained come last.
    for (auto o : add_always_kept(builder.missing_operations(wanted), end ? operation_id(none) : moments[j]))
      if (!builder.has_run(o) && (j == 0 || o > moments[j - 1]) && !builder.run(o)) return std::nullopt;
    if (!builder.compute_values(wanted)) return std::nullopt;
    if (end) break;
    const auto& operands = ops[moments[j]].inputs;
    for (value_id v = 0; v < p.values().size(); ++v)
      if (!retained[j][v] && (always_kept.empty() || !always_kept[v]) && !std::binary_search(operands.begin(), operands.end(), v))
        builder.drop(v);
    if (!builder.run(moments[j])) return std::nullopt;
  }
  return builder.finish();
}

}  // namespace remat::order
