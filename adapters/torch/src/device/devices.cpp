// SPDX-License-Identifier: Apache-2.0
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <remat/pytorch/device.hpp>
#include <remat/pytorch/free_memory.hpp>

#include "../base/reason.hpp"
#include "accelerator.hpp"

namespace remat::pytorch {

std::vector<device_status> devices() {
  std::vector<device_status> all = {{c10::kCPU, "host", host_limit(), host_free(), ""}};
  for (const auto kind :
       {c10::DeviceType::CUDA, c10::DeviceType::XPU, c10::DeviceType::MPS, c10::DeviceType::MTIA, c10::DeviceType::PrivateUse1}) {
    if (kind == c10::DeviceType::PrivateUse1 ? !c10::is_privateuse1_backend_registered() : !c10::impl::hasDeviceGuardImpl(kind))
      continue;
    const auto count = c10::impl::hasDeviceGuardImpl(kind) ? c10::impl::VirtualGuardImpl(kind).deviceCount() : 0;
    for (c10::DeviceIndex i = 0; i < std::max<c10::DeviceIndex>(count, 1); ++i) {
      device_status s;
      s.which = c10::Device(kind, count > 0 ? i : c10::DeviceIndex(-1));
      s.name = s.which.str();
      try {
        auto& d = accelerator_device(s.which);
        s.name = d.memory().name();
        s.total = d.total_bytes();
        s.available = d.free_bytes();
      } catch (const std::exception& e) {
        s.problem = reason_of(e);
      }
      all.push_back(std::move(s));
    }
  }
  return all;
}

std::unique_ptr<replayable> device::capture(const std::function<void()>&) { throw not_available(cannot_capture()); }

}  // namespace remat::pytorch
