// SPDX-License-Identifier: Apache-2.0
/// @file
/// Streams of a device that the host plays: each has a thread, memory is the process's, and all can be made to fail or to be
/// late.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "../src/device/streams.hpp"

namespace fake_streams {

/// What a recorded event tells.
struct signal {
  void set(int how) {
    {
      std::lock_guard lock(mutex);
      status = how;
      done = true;
    }
    changed.notify_all();
  }
  int wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
    return status;
  }
  bool is_done() {
    std::lock_guard lock(mutex);
    return done;
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  int status = 0;
};

struct event {
  std::shared_ptr<signal> last = std::make_shared<signal>();  ///< of the recording that was last
};

/// Jobs in order on a thread; one that fails spoils all later ones.
class stream {
 public:
  stream() : thread_([this] { run(); }) {}
  ~stream() {
    give([this] { ending_ = true; });
    thread_.join();
  }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  void give(std::function<void()> job) {
    {
      std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }
  int status = 0;  ///< for jobs of the stream

 private:
  void run() {
    while (!ending_) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !jobs_.empty(); });
      const auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool ending_ = false;
  std::thread thread_;
};

constexpr int no_memory = 2, not_yet = 600, broken = 700;

/// The state of the system. Kernels of a thread that has no stream run as they are called.
struct state {
  std::atomic<int> regions = 0, streams = 0, events = 0, rooms_made = 0, forgotten = 0;
  std::atomic<int> failing_allocations = 0;  ///< the next so many
  std::atomic<int> refused_copies = 0, broken_copies = 0;
  std::atomic<int> most_late = 0;     ///< microseconds before a copy, at random
  std::atomic<bool> stopped = false;  ///< copies do not begin
  std::atomic<bool> locks = false;    ///< page-locked memory is, as far as the process may
  stream* kernels = nullptr;
  remat::pytorch::memory_use by_others;
};
inline state& now() {
  static state only;
  return only;
}

/// Sleeps at times.
inline void dawdle() {
  while (now().stopped) std::this_thread::sleep_for(std::chrono::microseconds(50));
  thread_local std::mt19937 random(7);
  if (const int most = now().most_late; most > 0)
    std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(most)));
}

inline int allocate(void** data, std::size_t bytes) {
  if (now().failing_allocations > 0) {
    --now().failing_allocations;
    return no_memory;
  }
  *data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  ++now().regions;
  return 0;
}
inline int release(void* data) {
  std::free(data);
  --now().regions;
  return 0;
}

inline const remat::pytorch::stream_calls& calls() {
  static const remat::pytorch::stream_calls all = {
      .words =
          [](int status) {
            ++now().forgotten;
            return "failure " + std::to_string(status);
          },
      .not_ready = not_yet,
      .allocate = allocate,
      .release = release,
      .make_room = [] { ++now().rooms_made; },
      .allocated = [](c10::Device) { return now().by_others; },
      .reset_peak = [](c10::Device) { now().by_others.peak = now().by_others.live; },
      .allocate_locked =
          [](void** data, std::size_t bytes) {
            const auto failed = allocate(data, bytes);
            if (failed || !now().locks || mlock(*data, bytes) == 0) return failed;
            release(*data);
            return no_memory;
          },
      .release_locked = release,
      .make_stream =
          [](void** made) {
            *made = new stream;
            ++now().streams;
            return 0;
          },
      .end_stream =
          [](void* s) {
            delete static_cast<stream*>(s);
            --now().streams;
            return 0;
          },
      .kernels = [](c10::Device) -> void* { return now().kernels; },
      .make_event =
          [](void** made) {
            *made = new event;
            ++now().events;
            return 0;
          },
      .end_event =
          [](void* e) {
            delete static_cast<event*>(e);
            --now().events;
            return 0;
          },
      .record =
          [](void* e, void* s) {
            const auto told = static_cast<event*>(e)->last = std::make_shared<signal>();
            auto* const in = static_cast<stream*>(s);
            in == nullptr ? told->set(0) : in->give([told, in] { told->set(in->status); });
            return 0;
          },
      .reached =
          [](void* e) {
            const auto told = static_cast<event*>(e)->last;
            return told->is_done() ? told->wait() : not_yet;
          },
      .wait = [](void* e) { return static_cast<event*>(e)->last->wait(); },
      .wait_in =
          [](void* s, void* e) {
            const auto told = static_cast<event*>(e)->last;
            auto* const in = static_cast<stream*>(s);
            if (in == nullptr) return told->wait();
            in->give([told, in] {
              if (const auto failed = told->wait()) in->status = failed;
            });
            return 0;
          },
      .copy =
          [](void* to, const void* from, std::size_t bytes, void* s) {
            if (now().refused_copies > 0) return --now().refused_copies, broken;
            auto* const in = static_cast<stream*>(s);
            in->give([=] {
              dawdle();
              if (now().broken_copies > 0) {
                --now().broken_copies;
                in->status = broken;
              }
              if (in->status == 0) std::memcpy(to, from, bytes);
            });
            return 0;
          }};
  return all;
}

}  // namespace fake_streams
