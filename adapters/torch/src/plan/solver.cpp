// SPDX-License-Identifier: Apache-2.0
#include "solver.hpp"

#include <remat/core/solve.hpp>
#include <remat/registry/registry.hpp>
#include <remat/solver/lower_peak.hpp>
#include <remat/solver/order_in_phases.hpp>

namespace remat::pytorch {

result solve_by_default(const problem& p, bytes_t budget, const limits& l, const std::function<control(const progress&)>& watch) {
  return solve(p, budget, registry::find("automatic").make("auto"), l, watch);
}

std::optional<schedule> lower_peak_of(const problem& p, const schedule& start, bytes_t budget,
                                      const std::function<bool()>& stop) {
  auto order = order_in_phases(p, budget, stop);
  if (!order) order = lower_peak(p, compute_order(start), budget, stop);
  if (!order) return std::nullopt;
  return with_drops(p, *order);
}

}  // namespace remat::pytorch
