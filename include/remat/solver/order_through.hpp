// SPDX-License-Identifier: Apache-2.0
/// @file
/// Orders of computations that retain given values at several moments. Needs Eigen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include <remat/bound/moment_form.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// Computes what is needed up to each of several moments, forgets there what is not to be retained, goes on and computes what is
/// missing when it is needed.
/// @param p        the problem
/// @param moments  needed operations, ascending, each an ancestor of the next
/// @param retained per moment and value: on the device just before the moment runs first; its operands are in any case
/// @param free     per value: kept once made, and made as soon as that takes nothing else
/// @return the order, or nothing if a once-only operation would have to run again
/// Complexity: O(moments (values + edges) + edges executed).
inline std::optional<std::vector<index_t>> order_through(const problem& p, const std::vector<index_t>& moments,
                                                         const std::vector<std::vector<bool>>& retained,
                                                         const std::vector<bool>& free) {
  const auto& ops = p.operations();
  const auto needed = needed_operations(p);
  std::vector<bool> there(p.values().size(), false), has_run(ops.size(), false);
  for (index_t v = 0; v < there.size(); ++v) there[v] = p.is_source(v);
  std::vector<index_t> order;
  missing_operations missing(p);
  const auto run = [&](const std::vector<index_t>& list) {
    for (auto o : list) {
      if (ops[o].once && has_run[o]) return false;
      has_run[o] = true;
      order.push_back(o);
      for (auto v : ops[o].outputs) there[v] = true;
    }
    return true;
  };
  // Adds to the ascending `list`, all of which will run, what then is free.
  const auto add_free = [&](std::vector<index_t> list, index_t end) {
    std::vector<bool> listed(ops.size(), false);
    for (auto o : list) listed[o] = true;
    for (auto o : needed) {
      if (o >= end || listed[o] || has_run[o]) continue;
      listed[o] = std::all_of(ops[o].outputs.begin(), ops[o].outputs.end(), [&](index_t v) { return free[v]; }) &&
                  std::all_of(ops[o].inputs.begin(), ops[o].inputs.end(),
                              [&](index_t v) { return there[v] || (!p.is_source(v) && listed[p.producer(v)]); });
      if (listed[o]) list.push_back(o);
    }
    std::sort(list.begin(), list.end());
    return list;
  };
  for (std::size_t j = 0; j <= moments.size(); ++j) {
    std::vector<index_t> wanted = p.targets();
    if (j < moments.size()) {
      wanted = ops[moments[j]].inputs;
      for (index_t v = 0; v < there.size(); ++v)
        if (retained[j][v] && !free[v]) wanted.push_back(v);
    }
    // First runs in the order of the problem, each preceded by what it lacks; then what is to be retained and was lost.
    for (auto o : add_free(missing.for_values(wanted, there), j < moments.size() ? moments[j] : none))
      if (!has_run[o] && !run(missing.for_operation(o, there))) return std::nullopt;
    if (!run(missing.for_values(wanted, there))) return std::nullopt;
    if (j == moments.size()) break;
    const auto& operands = ops[moments[j]].inputs;
    for (index_t v = 0; v < there.size(); ++v)
      there[v] =
          there[v] && (p.is_source(v) || free[v] || retained[j][v] || std::binary_search(operands.begin(), operands.end(), v));
    if (!run({moments[j]})) return std::nullopt;
  }
  return prune_order(p, order);
}

/// The order that a solution of `moment_form` stands for: retains at each moment of which the solution has more than `threshold`.
/// It may need more than the budget. Complexity: that of `order_through`.
inline std::optional<std::vector<index_t>> order_of(const problem& p, const moment_form& form, const Eigen::VectorXd& x,
                                                    double threshold = 0.5) {
  std::vector<std::vector<bool>> retained(form.moments().size(), std::vector<bool>(p.values().size(), false));
  std::vector<bool> free(p.values().size());
  for (index_t v = 0; v < free.size(); ++v) {
    free[v] = form.negligible(v);
    for (std::size_t j = 0; j < retained.size() && !free[v]; ++j) retained[j][v] = form.retained(x, j, v) > threshold;
  }
  return order_through(p, form.moments(), retained, free);
}

}  // namespace remat
