// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makes a step return the summands of gradients instead of their sums. Private to the adapter.
#pragma once

#include <cstddef>
#include <vector>

#include "trace.hpp"

namespace remat::pytorch::detail {

/// A step that leaves sums to autograd, which adds one summand after another to gradients from elsewhere.
struct step_in_summands {
  /// Further summands follow all first summands: in `parameters` with the same slot, in `input_grads` behind those of all inputs.
  trace recorded;
  std::vector<std::size_t> inputs;  ///< per further gradient of an input: position of that input
};

/// Removes the last sums of `parameter_sums` and `input_sums` from a step. A summand that is written later is copied.
/// Complexity: O(calls * sums).
step_in_summands in_summands(const trace& recorded);

}  // namespace remat::pytorch::detail
