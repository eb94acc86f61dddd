// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is computed twice. Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step without what its backward computes as it has been computed before: a recomputation that the model does by itself
/// (`torch.utils.checkpoint`) becomes the planner's decision.
///
/// Merged are nodes of the same operators, arguments and operands, drawing from the same state of the generator. What a later
/// node overwrites, and what the caller gets, stays apart.
/// Complexity: O(n log n) comparisons of texts of the n nodes, as often as overwritten values are found to stay.
program merged(program step);

}  // namespace remat::pytorch
