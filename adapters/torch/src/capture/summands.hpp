// SPDX-License-Identifier: Apache-2.0
/// @file
/// Gradients that a step hands out as the summands that they consist of. Private to the adapter.
#pragma once

#include <cstddef>
#include <vector>

#include "trace.hpp"

namespace remat::pytorch::detail {

/// A step that leaves the sums to autograd, which adds summands one after another to what comes from elsewhere.
struct step_in_summands {
  /// Further summands follow the first ones: in `parameters` with the same slot, in `input_grads` behind those of all inputs.
  trace recorded;
  std::vector<std::size_t> inputs;  ///< per such gradient of an input: which one
};

/// The same step, without the last sums of `parameter_sums` and `input_sums`. A summand that is written later is copied.
/// Complexity: O(calls * sums).
step_in_summands in_summands(const trace& recorded);

}  // namespace remat::pytorch::detail
