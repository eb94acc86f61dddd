// SPDX-License-Identifier: Apache-2.0
/// @file
/// The emulated accelerator in PyTorch's registries: tensors live on `emulated:0` and `emulated:1`.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/irange.h>

#include <algorithm>

#include "accelerator.hpp"

namespace emulated::accelerator {
namespace {

class hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { set_current_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    const auto before = current_device();
    if (d >= 0) set_current_device(d);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(c10::DeviceIndex d) const override { return make_generator(d); }
  at::Device getDeviceFromPtr(void* p) const override {
    const int d = device_of(p);
    TORCH_CHECK(d >= 0, "emulated: this is no address of a device");
    return {kind, static_cast<c10::DeviceIndex>(d)};
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& s, std::size_t bytes) const override {
    const c10::DeviceGuard guard(s.device());
    auto data = c10::GetAllocator(kind)->allocate(bytes);
    if (const auto kept = std::min(bytes, s.nbytes()); kept > 0)
      copy(data.get(), s.data(), kept, stream_of(current_stream(current_device())));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    s.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

class accelerator_backend final : public backend {
 public:
  c10::DeviceType type() const override { return kind; }
  c10::DispatchKey key() const override { return c10::DispatchKey::PrivateUse1; }
  stream& current_stream(c10::DeviceIndex device) const override { return stream_of(accelerator::current_stream(device)); }
  std::function<philox()> draw(const at::Generator& given, c10::DeviceIndex device) const override {
    return accelerator::draw(given, device);
  }
};

const bool registered = [] {
  c10::SetAllocator(kind, &device_allocator());
  at::setHostAllocator(kind, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new hooks);
  c10::register_privateuse1_backend("emulated");
  return true;
}();

}  // namespace

const backend& this_backend() {
  static const auto* const only = new accelerator_backend;
  return *only;
}

}  // namespace emulated::accelerator

// --- for Python --------------------------------------------------------------------------------------------------------------

extern "C" {

/// Seeds the generators of all devices.
void emulated_seed(unsigned long seed) {
  for (const int d : c10::irange(emulated::device_count)) {
    at::Generator g = emulated::accelerator::default_generator(static_cast<c10::DeviceIndex>(d));
    const std::lock_guard guard(g.mutex());
    g.set_current_seed(seed);
  }
}

}  // extern "C"
