// SPDX-License-Identifier: Apache-2.0
/// @file
/// Finds operators that give other bits when they run again. Private to the adapter.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace remat::pytorch::detail {

/// A call below autograd, with digests in the place of its tensors.
struct observed_call {
  c10::OperatorHandle op;
  std::uint64_t operands, results;
};

/// Runs `f` and notes its calls, on this thread and on threads of the autograd engine. Only digests are kept. Views and
/// tensors without contents (`empty`) are left out.
/// @return the calls in the order of the run; none if a capture runs at the time on another thread
std::vector<observed_call> observe(const std::function<void()>& f);

/// The operators that gave other results for equal operands, in the order of the run, with their numbers of calls. Operators
/// that only pass on a difference of their operands are not among them.
/// Complexity: O(calls) expected.
std::vector<std::pair<std::string, std::size_t>> differing(const std::vector<observed_call>& first,
                                                           const std::vector<observed_call>& second);

}  // namespace remat::pytorch::detail
