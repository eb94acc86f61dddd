// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which nodes must keep their order. Private to the adapter.
#pragma once

#include <algorithm>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The node draws random numbers, writes something that outlives the step, or is the loss.
inline bool has_effects(const program& step, const node& n) {
  return n.random || n.once || std::any_of(n.outputs.begin(), n.outputs.end(), [&](index_t v) {
           return std::find(step.tokens.begin(), step.tokens.end(), v) != step.tokens.end();
         });
}

}  // namespace remat::pytorch
