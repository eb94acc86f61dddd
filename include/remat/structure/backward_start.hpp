// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where the backward of a training step begins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>

namespace remat::structure {

/// The position in `needed` of the first operation of the backward. It is `given`, or the start that the problem names, or a
/// guess: the operation at which store-all needs the most memory. There the forward has made all activations, and none is freed
/// yet.
/// @param p      the problem
/// @param needed `needed_operations(p)`, not empty
/// @param given  first operation of the backward, if the user knows it
/// @return a position; the last one if the named operation comes after all of `needed`
/// Complexity: O(log operations), or O(values + edges) for a guess.
inline std::size_t backward_start(const problem& p, const std::vector<operation_id>& needed,
                                  std::optional<operation_id> given = std::nullopt) {
  if (!given) given = p.backward_start();
  if (given) {
    const auto position = std::lower_bound(needed.begin(), needed.end(), *given) - needed.begin();
    return std::min(static_cast<std::size_t>(position), needed.size() - 1);
  }
  return heaviest_position(p, needed);
}

}  // namespace remat::structure
