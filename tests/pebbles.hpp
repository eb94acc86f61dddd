// SPDX-License-Identifier: Apache-2.0
/// @file
/// Pebbling: problems with one byte and one second per node.
#pragma once

#include <vector>

#include <remat/core/problem.hpp>

namespace remat::testing {

/// One byte and one second per node. `operands` lists the inputs of each node; the last node is the target.
inline problem pebbles(const std::vector<std::vector<value_id>>& operands) {
  const std::vector<value> values(operands.size(), value{"v", 1, false});
  std::vector<operation> operations;
  for (index_t i = 0; i < operands.size(); ++i) operations.push_back({"o", operands[i], {i}, 1});
  return problem("pebbles", values, operations, {static_cast<index_t>(operands.size() - 1)});
}

/// A pyramid, row by row from its base of w nodes.
inline problem pyramid(value_id w) {
  std::vector<std::vector<value_id>> operands(w);
  index_t row = 0;
  for (index_t width = w; width-- > 1; row += width + 1)
    for (index_t i = 0; i < width; ++i) operands.push_back({row + i, row + i + 1});
  return pebbles(operands);
}

/// A complete binary tree, level by level from its leaves.
inline problem complete_binary_tree(int levels) {
  const index_t leaves = index_t{1} << (levels - 1);
  std::vector<std::vector<value_id>> operands(leaves);
  for (index_t i = 0; operands.size() < 2 * leaves - 1; i += 2) operands.push_back({i, i + 1});
  return pebbles(operands);
}

}  // namespace remat::testing
