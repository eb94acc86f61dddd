// SPDX-License-Identifier: Apache-2.0
/// @file
/// Declarations shared by the parts of the emulated hardware. Only these parts include it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "hardware.hpp"
#include "races.hpp"

namespace emulated {

/// Values of the options. Atomic, because tests set them while streams run.
struct settings {
  std::atomic<long> late{0}, fail{0}, hold{0}, drop_waits{0}, wrong_stream{0}, alignment{0}, workspace{0}, bytes{16L << 30},
      pace{0}, link{0}, interference{0}, clock{0}, handles{0}, lost{0};
};
settings& options();

struct counters {
  std::atomic<long> jobs{0}, copies{0}, races{0}, allocations{0};
};
counters& counting();

/// Guards clocks, events, captures and the list of streams. The lock of a stream may be taken while it is held, never the
/// reverse.
std::mutex& world_lock();
/// Guards the lists of allocated memory. It may be taken while the lock of the world is held.
std::mutex& memory_lock();
/// The jobs that the host knows to be done. Guarded by the lock of the world.
vector_clock& host_clock();
/// The uses of all bytes. Guarded by the lock of the world.
history& accesses();
/// Counts a race. The caller holds the lock of the world.
void report_race(std::string text);

/// @throws failure if the device is lost, or if the process is a fork of a process with streams
void check_alive();
bool forked();

/// A capture in progress. Guarded by the lock of the world.
struct capture {
  unsigned long long id = 0;
  stream* origin = nullptr;
  std::vector<stream*> joined;  ///< streams that joined the capture, with the origin
  std::shared_ptr<graph> made;
  history accesses;
  std::string broken;  ///< the call that made the capture invalid; empty: none
  bool ended = false;
};
std::vector<std::shared_ptr<capture>>& captures();
[[noreturn]] void break_capture(capture& c, const std::string& text, capture_error::why why = capture_error::why::forbidden);
void add_to_capture(stream& s, job j);
/// Makes `s` part of the capture, ordered after the jobs in `seen`.
void join_capture(stream& s, const std::shared_ptr<capture>& c, const vector_clock& seen);

class graph {
 public:
  std::vector<job> jobs;
  std::vector<range> reads, writes;  ///< ranges of all jobs, adjacent ranges joined
};

/// A position in the order of a stream, which an event remembers.
class moment {
 public:
  void arrive(bool failed);
  void await();
  bool arrived();
  bool failed();
  std::chrono::steady_clock::time_point time();

  vector_clock seen;
  std::shared_ptr<capture> captured;  ///< null: not in a capture

 private:
  std::mutex lock_;
  std::condition_variable reached_;
  bool arrived_ = false, failed_ = false;
  std::chrono::steady_clock::time_point at_;
};

class event {
 public:
  std::shared_ptr<moment> last;  ///< guarded by the lock of the world
};

class stream {
 public:
  stream(int of_device, int number) : device(of_device), id(number), chance_(static_cast<unsigned>(number) + 1) {}

  /// Starts the thread, which keeps the stream alive.
  static void start(const std::shared_ptr<stream>& s);
  /// Adds work that always runs, such as a wait. `mark`, if given, arrives with the end of the work.
  std::uint64_t push(std::function<void()> work, std::shared_ptr<moment> mark = nullptr);
  /// Adds a job, which is skipped if an earlier job has failed.
  void push_job(job j, bool fails);
  void await(std::uint64_t ticket);
  /// Waits for all work added so far.
  void drain();
  bool drained() const;
  /// The message of the failed job; empty: no job failed.
  std::string failed() const;
  void forget_failure();
  void end();

  const int device;
  const int id;
  /// Held by a thread that adds work, from the moment when it looks at the memory that the work uses. Another thread may free
  /// memory after it has added work, and a kernel that gets this memory must come later in the stream. Taken before the lock of
  /// the world.
  std::recursive_mutex giving;
  bool is_default = false;
  vector_clock now;                   ///< guarded by the lock of the world
  std::shared_ptr<capture> captured;  ///< guarded by the lock of the world; null: not captured
  vector_clock captured_now;          ///< order inside the capture

 private:
  struct item {
    std::function<void()> work;
    std::shared_ptr<moment> mark;
  };
  void serve();
  void perform(const job& j);

  mutable std::mutex lock_;
  std::condition_variable more_, done_;
  std::deque<item> queue_;
  std::uint64_t given_ = 0, finished_ = 0;
  bool ending_ = false;
  std::string failure_;
  std::mt19937 chance_;  ///< the first number differs between adjacent seeds
};

std::vector<std::shared_ptr<stream>> streams_of(int device);  ///< takes the lock of the world
/// Runs a job on the calling thread, after the time of the link.
void perform_job(const job& j);

}  // namespace emulated
