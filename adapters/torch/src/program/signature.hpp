// SPDX-License-Identifier: Apache-2.0
/// @file
/// A node as text, without the identity of its values. Private to the adapter.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// Position of the first operand that is the same tensor as operand `k`.
inline std::size_t first_with_view(const call& c, std::size_t k) {
  return static_cast<std::size_t>(
      std::find_if(c.operands.begin(), c.operands.end(), [&](const auto& o) { return o.view == c.operands[k].view; }) -
      c.operands.begin());
}

/// Text of all that determines the cost and the results of a node, except the contents of its operands.
/// @param order gets the values in the calls, each once, by first appearance; the text refers to positions in this list
std::string signature(const program& step, const node& n, std::vector<index_t>* order = nullptr);

}  // namespace remat::pytorch
