// SPDX-License-Identifier: Apache-2.0
/// @file
/// Results written over operands that are no longer needed. Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step with results written over operands that no other node reads, by the `out` variants of the operators.
///
/// Such a call moves to the node that makes the operand, if the other operands exist there. Result and operand then are one value
/// of the plan: they need memory once, and are recomputed together. The operand must have the layout of the result, fill its
/// storage, and not be complex. The operator must give the same bits in place (`in_place_variant`). Complexity: O(operands).
program in_place(program step);

}  // namespace remat::pytorch
