// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs work beside the steps. Private to the adapter.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace remat::pytorch {

/// Runs one job at a time on a thread of its own. An exception ends the job.
class background {
 public:
  background() = default;
  background(const background&) = delete;
  background& operator=(const background&) = delete;
  ~background() { end(); }
  /// Ends the job, as far as it asks `ending`, and waits for its end. No job starts after that.
  void end() {
    ending_ = true;
    const std::lock_guard lock(mutex_);
    let_end();
  }
  /// Starts `job`, unless one is running or the system has no thread left.
  void start(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    if (process_ != getpid()) busy_ = false;
    if (ending_ || busy_.exchange(true)) return;
    let_end();
    process_ = getpid();
    try {
      thread_ = std::thread([this, job = std::move(job)] {
        try {
          job();
        } catch (...) {  // nobody to report to
        }
        busy_ = false;
      });
    } catch (const std::system_error&) {
      busy_ = false;
    }
  }
  bool ending() const { return ending_; }

 private:
  /// A forked process has none of its parent's threads. It must not touch the handle of such a thread: the system may have
  /// unmapped the memory behind the handle.
  void let_end() {
    if (!thread_.joinable()) return;
    if (process_ == getpid())
      thread_.join();
    else
      static_cast<void>(new std::thread(std::move(thread_)));
  }

  std::mutex mutex_;  ///< of start and end
  std::thread thread_;
  std::atomic<bool> busy_ = false, ending_ = false;
  pid_t process_ = 0;
};

}  // namespace remat::pytorch
