// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which nodes must keep their order. Private to the adapter.
#pragma once

#include <algorithm>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The node must run although nothing may read its results: it writes what outlives the step, or draws.
inline bool has_token(const program& step, const node& n) {
  return std::any_of(n.outputs.begin(), n.outputs.end(),
                     [&](index_t v) { return std::find(step.tokens.begin(), step.tokens.end(), v) != step.tokens.end(); });
}

/// The node draws random numbers, writes something that outlives the step, or is the loss.
inline bool has_effects(const program& step, const node& n) { return n.random || n.once || has_token(step, n); }

}  // namespace remat::pytorch
