// SPDX-License-Identifier: Apache-2.0
/// @file
/// Operators for masks that are kept as bits. Private to the adapter.
#pragma once

namespace remat::pytorch {

/// `remat::draw` gives what `bernoulli_` of the installed PyTorch draws into dense memory of any strides and type. Some builds
/// draw otherwise on some processors (with MKL on Intel's: in logical order, from another engine); there it throws.
/// Tried once in a process, with generators of its own.
bool draws_masks_alike();

}  // namespace remat::pytorch
