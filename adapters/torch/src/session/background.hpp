// SPDX-License-Identifier: Apache-2.0
/// @file
/// Work beside the steps. Private to the adapter.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

namespace remat::pytorch {

/// Runs one job at a time on a thread of its own; what it throws ends it.
class background {
 public:
  background() = default;
  background(const background&) = delete;
  background& operator=(const background&) = delete;
  ~background() {
    ending_ = true;
    if (!thread_.joinable()) return;
    process_ == getpid() ? thread_.join() : thread_.detach();  // a fork has no threads but its own
  }
  /// Starts `job`, unless one is running or the system has no thread left.
  void start(std::function<void()> job) {
    if (busy_.exchange(true)) return;
    if (thread_.joinable()) thread_.join();
    process_ = getpid();
    try {
      thread_ = std::thread([this, job = std::move(job)] {
        try {
          job();
        } catch (...) {  // nobody is there to be told
        }
        busy_ = false;
      });
    } catch (const std::system_error&) {
      busy_ = false;
    }
  }
  bool ending() const { return ending_; }

 private:
  std::thread thread_;
  std::atomic<bool> busy_ = false, ending_ = false;
  pid_t process_ = 0;
};

}  // namespace remat::pytorch
