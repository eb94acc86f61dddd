// SPDX-License-Identifier: Apache-2.0
/// @file
/// Work on another thread, where the system has one.
#pragma once

#include <future>
#include <system_error>
#include <type_traits>
#include <utility>

namespace remat {

/// Starts `work` on a thread of its own.
/// @tparam F callable without arguments
/// @param work what it refers to outlives the future
/// @return what `work` will return or throw; not `valid()` if the system has no thread left: then `work` has not been called
/// Complexity: that of starting a thread.
template <class F>
std::future<std::invoke_result_t<F>> beside(F&& work) {
  try {
    return std::async(std::launch::async, std::forward<F>(work));
  } catch (const std::system_error&) {
    return {};
  }
}

}  // namespace remat
