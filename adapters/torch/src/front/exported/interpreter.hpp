// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs a graph through the dispatcher: one call per node, in order, as Python does.
#pragma once

#include <vector>

#include "arguments.hpp"

namespace remat::pytorch::exported {

/// @param inputs one per input of the graph
/// @return its outputs
/// @throws bad_input; c10::Error of an operator, with its node and the line of the user's source
/// Complexity: that of the operators. A value is freed after its last use.
std::vector<at::IValue> run(const graph& g, std::vector<at::IValue> inputs);

}  // namespace remat::pytorch::exported
