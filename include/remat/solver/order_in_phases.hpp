// SPDX-License-Identifier: Apache-2.0
/// @file
/// Orders for budgets near the smallest feasible budget. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <remat/bound/memory_bound.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/destroy_repair.hpp>

namespace remat {

namespace detail {

/// A part of a schedule as a problem: from the values on the device before it to the values on the device after it.
struct phase {
  problem p;
  std::vector<operation_id> operations;  ///< ids in the whole problem
};

/// @param before       per value: on the device before the phase
/// @param after        per value: on the device after the phase
/// @param must_not_run per operation: true if it must not run any more
/// @return nothing if the phase needs a value that no operation may make any more
/// Complexity: O(values + edges).
inline std::optional<phase> phase_between(const problem& p, const std::vector<bool>& before, const std::vector<bool>& after,
                                          const std::vector<bool>& must_not_run) {
  const auto& ops = p.operations();
  auto needed = after;
  std::vector<operation_id> runs;
  for (operation_id o = static_cast<operation_id>(ops.size()); o-- > 0;) {
    const auto& outputs = ops[o].outputs;
    if (std::none_of(outputs.begin(), outputs.end(), [&](value_id v) { return needed[v] && !before[v]; })) continue;
    if (must_not_run[o]) return std::nullopt;
    runs.push_back(o);
    for (auto v : ops[o].inputs) needed[v] = true;
  }
  std::reverse(runs.begin(), runs.end());
  std::vector<value> values;
  std::vector<value_id> local_value(needed.size(), none), targets;
  const auto add = [&](value_id v) {
    values.push_back({"", p.values()[v].bytes, p.values()[v].held});
    return static_cast<value_id>(values.size() - 1);
  };
  for (value_id v = 0; v < needed.size(); ++v) {
    if (needed[v] || p.values()[v].held) local_value[v] = add(v);
    if (after[v]) targets.push_back(local_value[v]);
    if (needed[v] && !before[v] && p.is_source(v)) return std::nullopt;
  }
  std::vector<operation> operations;
  for (auto o : runs) {
    operation op{"", {}, {}, ops[o].seconds, ops[o].workspace, ops[o].once};
    for (auto v : ops[o].inputs) op.inputs.push_back(local_value[v]);
    for (auto v : ops[o].outputs)
      op.outputs.push_back(local_value[v] == none || before[v] ? add(v) : local_value[v]);  // there: a new value
    operations.push_back(std::move(op));
  }
  return phase{problem("", std::move(values), std::move(operations), std::move(targets)), std::move(runs)};
}

inline std::optional<std::vector<operation_id>> order_within(const problem& p, bytes_t budget, std::size_t depth,
                                                             const std::function<bool()>& stop);

/// An order that runs phase after phase. Between two phases it keeps the least bytes from which the operations that may still run
/// can make all targets.
inline std::optional<std::vector<operation_id>> order_through(const problem& p, bound::last_run_cut& cut,
                                                              const std::vector<std::vector<operation_id>>& phases,
                                                              bytes_t budget, std::size_t depth,
                                                              const std::function<bool()>& stop) {
  std::vector<operation_id> order;
  std::vector<bool> on_device(p.values().size()), must_not_run(p.operations().size());
  for (value_id v = 0; v < on_device.size(); ++v) on_device[v] = p.is_source(v);
  for (const auto& operations : phases) {
    for (auto o : operations) cut.forbid(o);
    auto kept = cut.values_to_keep();
    for (value_id v = 0; v < kept.size(); ++v) kept[v] = kept[v] || p.values()[v].held;
    const auto part = phase_between(p, on_device, kept, must_not_run);
    if (!part) return std::nullopt;
    const auto found = order_within(part->p, budget, depth, stop);
    if (!found) return std::nullopt;
    for (auto o : *found) {
      order.push_back(part->operations[o]);
      if (p.operations()[order.back()].once) must_not_run[order.back()] = true;
    }
    for (auto o : operations) must_not_run[o] = true;
    on_device = std::move(kept);
  }
  return order;
}

/// Tries the phases for several budgets, the given one first: a smaller budget has more phases.
inline std::optional<std::vector<operation_id>> order_by_phases(const problem& p, bytes_t budget, std::size_t depth,
                                                                const std::function<bool()>& stop) {
  bound::last_run_cut cut(p, stop);
  const auto least = std::min(budget, bound::last_large_run_bound(p, bounds_without_search(p).budget, stop));
  if (depth == 0 && budget - least > least / 20) return std::nullopt;  // far from the smallest: other orders are faster
  std::vector<std::vector<operation_id>> last;
  for (const bytes_t part : {1, 2, 4, 8}) {
    auto phases = bound::phases_of_last_runs(p, cut, least + (budget - least) / part).phases;
    if (phases.empty()) break;
    if (phases.size() < 2 || phases == last) continue;
    if (auto order = order_through(p, cut, phases, budget, depth, stop)) return order;
    last = std::move(phases);
  }
  return std::nullopt;
}

/// An order of a phase: repaired to fit, or divided into phases again.
inline std::optional<std::vector<operation_id>> order_within(const problem& p, bytes_t budget, std::size_t depth,
                                                             const std::function<bool()>& stop) {
  const auto start = needed_operations(p);
  order::destroy_repair candidate(p, budget, 1);
  for (const double spread : {0.0, 1.0}) {
    if (stop && stop()) return std::nullopt;
    candidate.load(start);
    std::size_t drops = 0;
    const auto enough = [&] { return drops++ > 50 + start.size() / 4 || (stop && stop()); };
    if (candidate.repair(spread, std::numeric_limits<double>::infinity(), enough)) return candidate.order();
  }
  constexpr std::size_t max_phase_depth = 3;
  return depth < max_phase_depth ? order_by_phases(p, budget, depth + 1, stop) : std::nullopt;
}

}  // namespace detail

/// An order for a budget so small that it matters which operations run for the last time after which others. Each phase of last
/// runs (`bound::phases_of_last_runs`) is a problem of its own, whose order is repaired to fit. So targets that would take memory
/// from large operations are computed after them.
/// @param p      the problem
/// @param budget bytes
/// @param stop   polled within cuts and repairs; true gives up
/// @return an order within the budget; nothing if none is found, if there is only one phase, or if `p` is not plain
/// Complexity: that of `phases_of_last_runs`, and two repairs for each phase.
inline std::optional<std::vector<operation_id>> order_in_phases(const problem& p, bytes_t budget,
                                                                const std::function<bool()>& stop = {}) {
  if (!p.plain()) return std::nullopt;
  try {
    auto order = detail::order_by_phases(p, budget, 0, stop);
    if (order && measure_order(p, *order).peak <= budget) return order;
  } catch (const bound::interrupted&) {  // stopped within a cut
  }
  return std::nullopt;
}

}  // namespace remat
