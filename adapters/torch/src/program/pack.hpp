// SPDX-License-Identifier: Apache-2.0
/// @file
/// Masks of dropout as bits. Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step with masks of dropout drawn and kept as bits: one bit per element instead of one number.
///
/// A mask is a draw of `bernoulli_` into new dense memory on the host, divided by a number or not. Products with the mask read
/// the bits. For other readers the mask is unpacked. Masks that the caller gets or that are overwritten stay as they are. If the
/// installed PyTorch draws in another way, all masks stay. Complexity: O(operands).
program packed(program step);

}  // namespace remat::pytorch
