// SPDX-License-Identifier: Apache-2.0
/// @file
/// Removal of repeated computations (common subexpressions). Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step without computations in its backward that repeat earlier ones. So a recomputation by the model itself
/// (`torch.utils.checkpoint`) becomes the planner's decision.
///
/// Two nodes merge if they have equal operators, arguments and operands, and draw from the same state of the generator. Values
/// that a later node overwrites, and values that the caller gets, are not merged.
/// Complexity: O(n log n) comparisons of texts for n nodes, repeated while overwritten values are found that must stay.
program merged(program step);

}  // namespace remat::pytorch
