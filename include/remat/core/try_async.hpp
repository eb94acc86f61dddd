// SPDX-License-Identifier: Apache-2.0
/// @file
/// Work on another thread, if the system has a free one.
#pragma once

#include <future>
#include <system_error>
#include <type_traits>
#include <utility>

namespace remat {

/// Calls `work` on a new thread.
/// @tparam F callable without arguments
/// @param work the call; objects that it refers to must outlive the future
/// @return the future result or exception of `work`; not `valid()` if the system has no thread left, and `work` is not called
/// Complexity: that of starting a thread.
template <class F>
std::future<std::invoke_result_t<F>> try_async(F&& work) {
  try {
    return std::async(std::launch::async, std::forward<F>(work));
  } catch (const std::system_error&) {
    return {};
  }
}

}  // namespace remat
