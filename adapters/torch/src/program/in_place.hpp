// SPDX-License-Identifier: Apache-2.0
/// @file
/// Results in the place of operands that end. Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step with results written over operands that nobody else reads, by the `out` variants of the operators.
///
/// Such a call goes to the node that makes the operand, where its other operands are there already: result and operand are one
/// value of the plan, take the memory of one, and run again together. An operand counts if it has the layout of the result and
/// fills its storage, is neither complex nor of half precision, and if the operator gives the same bits in place
/// (`in_place_variant`). Complexity: O(operands).
program in_place(program step);

}  // namespace remat::pytorch
