// SPDX-License-Identifier: Apache-2.0
// Memory of an accelerator, or pinned memory of the host, that knows which streams use it.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../base/views.hpp"
#include "allocator.hpp"
#include "backend.hpp"
#include "stream_events.hpp"
#include "tier.hpp"

namespace remat::pytorch {

/// State that the regions, the links and the device share.
struct accelerator_state {
  accelerator_state(c10::Device d, pytorch::backend& b)
      : on(d), of(b), impl(d.type()), events(std::make_shared<event_pool>(d.type(), c10::EventFlag::PYTORCH_DEFAULT)) {}
  c10::Device on;
  pytorch::backend& of;
  c10::impl::VirtualGuardImpl impl;
  std::shared_ptr<event_pool> events;

  c10::Stream kernels() const { return impl.getStream(on); }
  bool capturing() const { return impl.isStreamCapturing(kernels()); }
  /// A stream for copies. PyTorch hands out a few streams in turns. Captures take streams of its other pool: a copy of another
  /// thread on the same stream would become part of the graph.
  c10::Stream new_stream(bool for_captures = false) const { return impl.getStreamFromGlobalPool(on, for_captures); }

  /// See `device::lost`.
  std::string lost() const {
    if (capturing()) return "";  // waiting is forbidden during a capture
    try {
      const c10::DeviceGuard guard(on);
      stream_event(events, kernels(), "").wait();
      return "";
    } catch (const std::exception& e) {
      return reason_of(e);
    }
  }

  /// Issues a copy on `stream`, between the host and the device or within the device.
  void copy(void* to, c10::Device to_device, const void* from, c10::Device from_device, bytes_t bytes, c10::Stream stream) const {
    const c10::StreamGuard guard(stream);
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below;
    view(to, to_device, bytes).copy_(view(const_cast<void*>(from), from_device, bytes), true);
  }
  static at::Tensor view(void* data, c10::Device device, bytes_t bytes) {
    return bytes_over(storage_over(data, static_cast<std::size_t>(bytes), device));
  }

  struct copy_in_flight {
    const link* by;
    std::shared_ptr<region> to, from;
    ticket done;
  };
  std::mutex copies_mutex;
  std::vector<copy_in_flight> copies;

  /// Drops the regions of finished copies.
  /// @param wait first wait for all copies of `by`, or of all links if `by` is null
  void drop_finished(bool wait = false, const link* by = nullptr) {
    std::vector<copy_in_flight> ended;  // destroyed after the lock is released
    std::lock_guard lock(copies_mutex);
    for (auto& c : copies) {
      if (wait && (by == nullptr || c.by == by)) try {
          c.done->wait();
        } catch (const copy_failed&) {  // the copy is no longer needed
        }
      if (c.done->reached()) ended.push_back(std::move(c));
    }
    std::erase_if(copies, [](const auto& c) { return c.done == nullptr; });
  }
};

inline std::string text_of_lost(c10::Device on, const std::string& why) {
  return on.str() + " does not work any more (" + why + "); start the program again, or go on with the model on the host";
}

class device_region;
/// Regions on accelerators by first address: `record_stream` finds the region of a block here.
struct region_index {
  std::mutex mutex;
  std::map<const char*, device_region*> by_address;
  static region_index& instance() {
    static auto* const only = new region_index;  // tensors die after static objects
    return *only;
  }
};

/// Memory of a device or pinned memory of the host, in one piece from the backend's allocator.
class device_region final : public region {
 public:
  /// @throws out_of_memory
  device_region(std::shared_ptr<accelerator_state> s, bool pinned, const std::string& tier, bytes_t bytes)
      : shared_(std::move(s)), pinned_(pinned), bytes_(bytes) {
    if (bytes == 0) return;
    const c10::DeviceGuard guard(shared_->on);
    shared_->drop_finished();
    try {
      memory_ = allocate();
    } catch (const std::exception&) {
      shared_->drop_finished(true);
      if (!pinned_) detail::return_idle_arenas(shared_->on);
      shared_->of.own().emptyCache();
      memory_ = allocate_or_tell(tier);
    }
    if (!pinned_)
      allocated_ = std::make_shared<stream_event>(shared_->events, shared_->kernels(), "kernels on " + shared_->on.str());
    detail::add_arena(data(), bytes_);
    if (pinned_) detail::count(bytes_);
    auto& index = region_index::instance();
    std::lock_guard lock(index.mutex);
    index.by_address[data()] = this;
  }
  ~device_region() override {
    if (bytes_ == 0) return;
    {
      auto& index = region_index::instance();
      std::lock_guard lock(index.mutex);
      index.by_address.erase(data());
    }
    detail::remove_arena(data());
    if (pinned_) detail::count(-bytes_);
    if (process_ != getpid()) memory_.release_context();  // a forked child must not free memory of its parent
  }
  device_region(const device_region&) = delete;
  device_region& operator=(const device_region&) = delete;

  char* data() const override { return static_cast<char*>(memory_.get()); }
  c10::Device on() const override { return pinned_ ? c10::Device(c10::kCPU) : shared_->on; }
  bytes_t bytes() const override { return bytes_; }
  void read(char* to, bytes_t offset, bytes_t bytes) const override { copy_now(to, c10::kCPU, data() + offset, on(), bytes); }
  void write(const char* from, bytes_t offset, bytes_t bytes) override {
    copy_now(data() + offset, on(), from, c10::kCPU, bytes);
  }

  /// Notes that work on `s` reads the region, beside the stream of its step.
  void used_in(c10::Stream s) {
    if (pinned_) return;
    shared_->of.own().recordStream(memory_, s);  // in case the arena itself is freed
    std::lock_guard lock(mutex_);
    if (std::find(reading_streams_.begin(), reading_streams_.end(), s) == reading_streams_.end()) reading_streams_.push_back(s);
  }
  /// Event at the allocation: earlier kernels on the stream may still use the memory for its previous owner, so copies wait for
  /// it. Null once a step has begun. Its kernels come later on that stream, or wait for the event.
  ticket allocated() const {
    std::lock_guard lock(mutex_);
    return allocated_;
  }
  /// Begins a step in the region, on the current stream.
  void enter() {
    if (bytes_ == 0) return;
    const auto now = shared_->kernels();
    std::lock_guard lock(mutex_);
    continue_after(std::exchange(allocated_, nullptr), now);
    for (const auto& s : reading_streams_)
      if (s != now) stream_event(shared_->events, s, "work that reads gradients on " + shared_->on.str()).block(now);
    reading_streams_.clear();
    if (std::find(step_streams_.begin(), step_streams_.end(), now) != step_streams_.end()) return;
    step_streams_.push_back(now);
    shared_->of.own().recordStream(memory_, now);  // freed only after the work on this stream
  }

 private:
  c10::DataPtr allocate() const {
    const auto n = static_cast<std::size_t>(bytes_);
    return pinned_ ? shared_->of.pinned(shared_->on, n) : shared_->of.own().allocate(n);
  }
  c10::DataPtr allocate_or_tell(const std::string& tier) const {
    try {
      return allocate();
    } catch (const std::exception& e) {
      if (const auto why = shared_->lost(); !why.empty()) throw device_lost(text_of_lost(shared_->on, why));
      rlimit locked{};
      if (pinned_ && getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur < static_cast<rlim_t>(bytes_))
        throw out_of_memory(tier, bytes_, static_cast<bytes_t>(locked.rlim_cur),
                            reason_of(e) + " (RLIMIT_MEMLOCK, see ulimit -l)");
      const auto left = pinned_ ? 0 : allowed_memory(shared_->of, shared_->on).second;
      throw out_of_memory(tier, bytes_, left, reason_of(e));
    }
  }
  /// Copies on a separate stream, and waits for the copy.
  void copy_now(void* to, c10::Device to_device, const void* from, c10::Device from_device, bytes_t bytes) const {
    if (bytes == 0) return;
    const auto what = "copy of " + std::to_string(bytes) + " bytes on " + shared_->on.str();
    try {
      const auto stream = shared_->new_stream();
      continue_after(allocated(), stream);
      shared_->copy(to, to_device, from, from_device, bytes, stream);
      stream_event(shared_->events, stream, what).wait();
    } catch (const copy_failed&) {
      throw;
    } catch (const std::exception& e) {
      throw copy_failed(what + ": " + reason_of(e));
    }
  }

  std::shared_ptr<accelerator_state> shared_;
  bool pinned_;
  bytes_t bytes_;
  c10::DataPtr memory_;
  mutable std::mutex mutex_;
  ticket allocated_;
  std::vector<c10::Stream> reading_streams_;  ///< streams that the next step waits for
  std::vector<c10::Stream> step_streams_;     ///< streams that steps have run on
  pid_t process_ = getpid();
};

class accelerator_tier final : public limited_tier {
 public:
  accelerator_tier(std::shared_ptr<accelerator_state> s, bool pinned, std::string name, bytes_t limit)
      : limited_tier(std::move(name), limit), shared_(std::move(s)), pinned_(pinned) {}

 private:
  std::unique_ptr<region> make(bytes_t bytes) override {
    return std::make_unique<device_region>(shared_, pinned_, name(), bytes);
  }
  void free_pending() override { shared_->drop_finished(true); }
  std::shared_ptr<accelerator_state> shared_;
  bool pinned_;
};

}  // namespace remat::pytorch
