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

/// A call below autograd, with digests of its tensors.
struct observed_call {
  c10::OperatorHandle op;
  std::uint64_t operands, results;
};

/// Runs `f` and notes its calls, on this thread and on threads of the autograd engine. Only digests are kept. Views and tensors
/// without contents (`empty`) are left out.
/// @return the calls in the order of the run; empty if another thread captures at this time
std::vector<observed_call> observe(const std::function<void()>& f);

/// The operators that gave other results for equal operands, in the order of the run, with the number of such calls. Operators
/// whose operands differed already are left out.
/// Complexity: O(calls) expected.
std::vector<std::pair<std::string, std::size_t>> differing(const std::vector<observed_call>& first,
                                                           const std::vector<observed_call>& second);

}  // namespace remat::pytorch::detail
