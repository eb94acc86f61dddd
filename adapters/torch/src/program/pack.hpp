// SPDX-License-Identifier: Apache-2.0
/// @file
/// Masks as bits. Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step with masks of dropout drawn and kept as bits: one for each element instead of a number of its type.
///
/// A mask is what `bernoulli_` draws into new dense memory on the host, divided by a number or not. Products with it read the
/// bits; for what else reads it, it is made from the bits. Masks that the caller gets, or that are written, stay as they are; so
/// do all where the installed PyTorch draws in another way. Complexity: O(operands).
program packed(program step);

}  // namespace remat::pytorch
