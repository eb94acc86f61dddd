// SPDX-License-Identifier: Apache-2.0
/// @file
/// Devices, streams and events of the accelerator, through the interface of c10.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <mutex>

#include "accelerator.hpp"

namespace emulated::accelerator {
namespace {

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, device_count> streams_now{};  ///< 0: the default stream

c10::DeviceIndex index_of(c10::Device d) { return d.has_index() ? d.index() : device_now; }

c10::Stream named(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kind, device), id);
}

/// Streams are never destroyed, because copies of their ids may exist anywhere. So their number is limited, as on CUDA.
c10::Stream next_stream(c10::DeviceIndex device, bool high_priority = false) {
  constexpr std::size_t most = 32;
  struct pool {
    std::vector<stream*> made;
    std::size_t next = 0;
  };
  static std::mutex lock;
  static auto* const pools = new std::array<std::array<pool, 2>, device_count>;
  const std::lock_guard guard(lock);
  auto& p = pools->at(static_cast<std::size_t>(device))[high_priority];
  if (p.made.size() < most) {
    p.made.push_back(&make_stream(device));
    return named(device, reinterpret_cast<c10::StreamId>(p.made.back()));
  }
  return named(device, reinterpret_cast<c10::StreamId>(p.made[p.next++ % most]));
}

struct timed_event {
  std::shared_ptr<event> of = make_event();
  bool timed = false;
};
event& of(void* e) { return *static_cast<timed_event*>(e)->of; }

class guard_impl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before(kind, device_now);
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {kind, device_now}; }
  void setDevice(c10::Device d) const override { set_current_device(index_of(d)); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { device_now = index_of(d); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device d) const override { return current_stream(index_of(d)); }
  c10::Stream getDefaultStream(c10::Device d) const override { return named(index_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int) const override { return next_stream(index_of(d)); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool high_priority) const override {
    return next_stream(index_of(d), high_priority);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = current_stream(s.device_index());
    streams_now.at(static_cast<std::size_t>(s.device_index())) = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &stream_of(s); }
  bool queryStream(const c10::Stream& s) const override { return idle(stream_of(s)); }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(stream_of(s)); }
  bool isStreamCapturing(const c10::Stream& s) const override { return capturing(stream_of(s)); }
  void synchronizeDevice(c10::DeviceIndex d) const override { emulated::synchronize_device(d < 0 ? device_now : d); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    c10::getDeviceAllocator(kind)->recordStream(p, s);
  }

  void record(void** e, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (*e == nullptr) *e = new timed_event;
    auto& known = *static_cast<timed_event*>(*e);
    known.timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    emulated::record(*known.of, stream_of(s));
  }
  void block(void* e, const c10::Stream& s) const override {
    if (e != nullptr) wait(stream_of(s), of(e));
  }
  bool queryEvent(void* e) const override { return e == nullptr || reached(of(e)); }
  void synchronizeEvent(void* e) const override {
    if (e != nullptr) synchronize(of(e));
  }
  void destroyEvent(void* e, c10::DeviceIndex) const noexcept override { delete static_cast<timed_event*>(e); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "emulated: both events must be recorded");
    TORCH_CHECK(static_cast<timed_event*>(from)->timed && static_cast<timed_event*>(to)->timed,
                "emulated: events without timing");
    return milliseconds(of(from), of(to));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, guard_impl)

}  // namespace

c10::DeviceIndex current_device() { return device_now; }
void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(0 <= device && device < device_count, "emulated: there is no device ", static_cast<int>(device));
  device_now = device;
}
c10::Stream current_stream(c10::DeviceIndex device) { return named(device, streams_now.at(static_cast<std::size_t>(device))); }
stream& stream_of(const c10::Stream& s) {
  return s.id() == 0 ? default_stream(s.device_index()) : *reinterpret_cast<stream*>(s.id());
}

}  // namespace emulated::accelerator
