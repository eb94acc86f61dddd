// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a node does, apart from the values it does it to. Private to the adapter.
#pragma once

#include <string>
#include <vector>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// All that the cost and the results of a node depend on but the contents of its operands, as text.
/// @param order gets the values the calls name, each once, by first appearance: the text tells them by position in it
std::string signature(const program& step, const node& n, std::vector<index_t>* order = nullptr);

}  // namespace remat::pytorch
