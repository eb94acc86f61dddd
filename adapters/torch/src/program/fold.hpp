// SPDX-License-Identifier: Apache-2.0
/// @file
/// Constant folding on devices other than that of the step. Private to the adapter.
#pragma once

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The same step, in which values on a device other than `on` become constants if they depend on constants only. Examples are
/// positions and masks that a model makes on the host, for a step elsewhere. Memory of the other device is not planned.
/// Complexity: O(nodes), and one run of each removed node.
program folded(program step, c10::Device on);

}  // namespace remat::pytorch
