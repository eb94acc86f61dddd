// SPDX-License-Identifier: Apache-2.0
/// @file
/// Operators for masks that are kept as bits. Private to the adapter.
#pragma once

namespace remat::pytorch {

/// True if `remat::draw` draws like `bernoulli_` of the installed PyTorch, for dense memory of any strides and type. Some builds
/// draw in another way on some processors (with MKL on Intel's: in logical order, from another engine). There `remat::draw`
/// throws. Tested once per process, with generators of its own.
bool draws_masks_alike();

}  // namespace remat::pytorch
