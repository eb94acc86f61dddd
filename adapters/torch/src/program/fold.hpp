// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a step makes on another device than its own. Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step in which values that lie on another device than `on`, and are made of constants alone, are constants themselves:
/// positions and masks that a model makes on the host, for a step elsewhere. Memory of the other device is not planned.
/// Complexity: O(nodes), and one run of each that goes.
program folded(program step, c10::Device on);

}  // namespace remat::pytorch
