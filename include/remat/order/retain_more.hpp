// SPDX-License-Identifier: Apache-2.0
/// @file
/// Fills the room left in a budget with retained values.
#pragma once

#include <functional>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/order/destroy_repair.hpp>

namespace remat::order {

/// Removes the recomputations of an order whose outputs can be retained within the budget.
/// @param p      the problem
/// @param order  a valid order that fits the budget
/// @param budget bytes
/// @param stop   polled now and then; true ends the call early
/// @return a valid order that fits the budget
/// Complexity: O(values + edges executed), and a few passes over the recomputations.
inline std::vector<operation_id> retain_more(const problem& p, const std::vector<operation_id>& order, bytes_t budget,
                                             const std::function<bool()>& stop = {}) {
  destroy_repair candidate(p, budget, 0);
  candidate.load(order);
  candidate.retain(true, stop);
  return candidate.order();
}

}  // namespace remat::order
