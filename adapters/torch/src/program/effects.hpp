// SPDX-License-Identifier: Apache-2.0
/// @file
/// Nodes that must keep their order. Private to the adapter.
#pragma once

#include <algorithm>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// True if the node must run even if no node reads its results: its writes outlive the step, or it draws.
inline bool has_token(const program& step, const node& n) {
  return std::any_of(n.outputs.begin(), n.outputs.end(),
                     [&](index_t v) { return std::find(step.tokens.begin(), step.tokens.end(), v) != step.tokens.end(); });
}

/// True if the node draws random numbers, writes something that outlives the step, or is the loss.
inline bool has_effects(const program& step, const node& n) { return n.random || n.once || has_token(step, n); }

}  // namespace remat::pytorch
