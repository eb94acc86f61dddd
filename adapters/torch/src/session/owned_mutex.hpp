// SPDX-License-Identifier: Apache-2.0
/// @file
/// A mutex that knows which thread holds it. Private to the adapter.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include <remat/pytorch/session.hpp>

namespace remat::pytorch {

/// A `std::mutex` whose `try_lock` fails, as it should, on the thread that holds it, where `lock` is an error. An allocation that
/// finds no memory asks all sessions for idle arenas, and its thread may be at work for one of them.
class owned_mutex {
 public:
  /// @throws not_supported on the thread that holds it: a forward that is recorded asks its own session
  void lock() {
    if (owner_ == std::this_thread::get_id())
      throw not_supported("remat: a session cannot be asked by a forward that it records just now; ask it after the call");
    mutex_.lock();
    owner_ = std::this_thread::get_id();
  }
  bool try_lock() {
    if (owner_ == std::this_thread::get_id() || !mutex_.try_lock()) return false;
    owner_ = std::this_thread::get_id();
    return true;
  }
  /// This thread holds it.
  bool is_owned() const { return owner_ == std::this_thread::get_id(); }
  void unlock() {
    owner_ = std::thread::id();
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
};

}  // namespace remat::pytorch
