// SPDX-License-Identifier: Apache-2.0
/// @file
/// Programs with fewer or more nodes. Private to the adapter.
#pragma once

#include <set>
#include <vector>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// Values that the caller gets.
std::set<index_t> handed_out(const program& step);

/// The program without the nodes that are not wanted, and without values that nobody makes.
/// @param wanted per node; the loss is, and whatever wanted nodes, targets and origins of draws name
program only(program step, const std::vector<bool>& wanted);

/// Puts nodes behind others.
/// @param added per node of the program; they draw nothing
void insert_behind(program& step, std::vector<std::vector<node>> added);

}  // namespace remat::pytorch
