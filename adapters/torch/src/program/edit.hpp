// SPDX-License-Identifier: Apache-2.0
/// @file
/// Removes nodes from programs, and adds nodes. Private to the adapter.
#pragma once

#include <set>
#include <vector>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// Values that the caller gets: outputs and gradients.
std::set<index_t> handed_out(const program& step);

/// The program without unwanted nodes, and without values that no remaining node makes.
/// @param wanted per node. True for the loss, and for every node that wanted nodes, targets and origins of draws refer to
program with_only(program step, const std::vector<bool>& wanted);

/// Inserts nodes behind nodes of the program.
/// @param added per node of the program: the nodes to insert behind it. They must not draw
void insert_behind(program& step, std::vector<std::vector<node>> added);

/// Makes hooks inside of the forward read the gradients of parameters that are complete there in eager mode. So a hook can look
/// at them.
void order_hooks(program& step);

}  // namespace remat::pytorch
