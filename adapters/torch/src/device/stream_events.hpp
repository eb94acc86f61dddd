// SPDX-License-Identifier: Apache-2.0
// Events in streams of an accelerator.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <remat/pytorch/device.hpp>

#include "../base/reason.hpp"

namespace remat::pytorch {

/// A pool of events, so that a step creates none.
class event_pool {
 public:
  event_pool(c10::DeviceType kind, c10::EventFlag flag) : kind_(kind), flag_(flag) {}

  c10::Event take() {
    std::lock_guard lock(mutex_);
    if (idle_.empty() || process_ != getpid()) return c10::Event(kind_, flag_);
    auto e = std::move(idle_.back());
    idle_.pop_back();
    return e;
  }
  void give_back(c10::Event e) {
    std::lock_guard lock(mutex_);
    idle_.push_back(std::move(e));
  }

 private:
  c10::DeviceType kind_;
  c10::EventFlag flag_;
  std::mutex mutex_;
  std::vector<c10::Event> idle_;
  pid_t process_ = getpid();  ///< a forked child cannot use events of its parent
};

/// A point in the work of a stream.
class stream_event final : public event {
 public:
  /// @throws copy_failed
  stream_event(std::shared_ptr<event_pool> pool, c10::Stream stream, const std::string& what)
      : pool_(std::move(pool)), what_(what), event_(pool_->take()) {
    checked([&] { event_.record(stream); });
  }
  ~stream_event() override { pool_->give_back(std::move(event_)); }
  bool reached() const override {
    try {
      return event_.query();
    } catch (const std::exception&) {  // `wait` reports it
      return true;
    }
  }
  void wait() const override {
    checked([&] { event_.synchronize(); });
  }
  /// Makes later work in `stream` run after this event.
  /// @throws copy_failed
  void block(c10::Stream stream) const {
    checked([&] { event_.block(stream); });
  }
  c10::DeviceType kind() const { return event_.device_type(); }
  double seconds_until(const stream_event& later) const { return event_.elapsedTime(later.event_) / 1e3; }

 private:
  template <class F>
  void checked(F f) const {
    try {
      f();
    } catch (const std::exception& e) {
      throw copy_failed(what_.empty() ? reason_of(e) : what_ + ": " + reason_of(e));
    }
  }
  std::shared_ptr<event_pool> pool_;
  std::string what_;
  c10::Event event_;
};

/// The event of a copy that could not be issued.
class failed_event final : public event {
 public:
  explicit failed_event(std::string what) : what_(std::move(what)) {}
  bool reached() const override { return true; }
  void wait() const override { throw copy_failed(what_); }

 private:
  std::string what_;
};

/// Makes later work in `stream` run after `t`. An event of another kind of device blocks the calling thread instead.
inline void continue_after(const ticket& t, c10::Stream stream) {
  if (!t) return;
  if (const auto* e = dynamic_cast<const stream_event*>(t.get()); e != nullptr && e->kind() == stream.device_type())
    e->block(stream);
  else
    t->wait();
}

}  // namespace remat::pytorch
