// SPDX-License-Identifier: Apache-2.0
/// @file
/// Room that is left, used.
#pragma once

#include <functional>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/order/destroy_repair.hpp>

namespace remat::order {

/// A valid order, in any case within the budget, without the recomputations whose results can be retained.
/// @param stop polled now and then; true returns what is retained by then
/// Complexity: O(values + edges executed), and a few passes over the recomputations.
inline std::vector<operation_id> retain_more(const problem& p, const std::vector<operation_id>& order, bytes_t budget,
                                             const std::function<bool()>& stop = {}) {
  destroy_repair n(p, budget, 0);
  n.load(order);
  n.retain(true, stop);
  return n.order();
}

}  // namespace remat::order
