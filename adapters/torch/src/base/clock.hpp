// SPDX-License-Identifier: Apache-2.0
/// @file
/// Measures time in seconds. Private to the adapter.
#pragma once

#include <ATen/Parallel.h>
#include <time.h>

#include <algorithm>
#include <chrono>

namespace remat::pytorch {

using clock = std::chrono::steady_clock;

inline double since(clock::time_point t) { return std::chrono::duration<double>(clock::now() - t).count(); }

/// Measures the time of a call, without time that the machine spent on other work, if that can be told.
class stopwatch {
 public:
  /// In seconds; with a single thread, at most the processor time of the thread.
  double seconds() const {
    const double wall = since(begin_);
    return at::get_num_threads() == 1 ? std::min(wall, processor() - processor_) : wall;
  }
  /// True if the thread had a processor nearly all the time.
  bool undisturbed() const {
    const double wall = since(begin_);
    return wall < 100e-6 || processor() - processor_ > 0.8 * wall;
  }

 private:
  static double processor() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  double processor_ = processor();
  clock::time_point begin_ = clock::now();
};

}  // namespace remat::pytorch
