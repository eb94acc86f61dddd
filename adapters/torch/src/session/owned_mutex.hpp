// SPDX-License-Identifier: Apache-2.0
/// @file
/// A mutex that knows which thread holds it. Private to the adapter.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

#include <remat/pytorch/session.hpp>

namespace remat::pytorch {

/// A mutex whose `try_lock` fails, and whose `lock` throws, on the thread that holds it. An allocation that finds no memory asks
/// all sessions for idle arenas, and its thread may be working for one of these sessions.
class owned_mutex {
 public:
  /// @throws not_supported on the thread that holds it: a forward that is being recorded calls its own session
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
  /// True if this thread holds the mutex.
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
