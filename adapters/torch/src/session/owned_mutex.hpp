// SPDX-License-Identifier: Apache-2.0
/// @file
/// A mutex that knows which thread holds it. Private to the adapter.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>

namespace remat::pytorch {

/// A `std::mutex` whose `try_lock` fails, as it should, on the thread that holds it. An allocation that finds no memory asks all
/// sessions for idle arenas, and its thread may be at work for one of them.
class owned_mutex {
 public:
  void lock() {
    mutex_.lock();
    owner_ = std::this_thread::get_id();
  }
  bool try_lock() {
    if (owner_ == std::this_thread::get_id() || !mutex_.try_lock()) return false;
    owner_ = std::this_thread::get_id();
    return true;
  }
  void unlock() {
    owner_ = std::thread::id();
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
};

}  // namespace remat::pytorch
