// SPDX-License-Identifier: Apache-2.0
/// @file
/// Parts of the emulated accelerator: PyTorch's PrivateUse1, with two devices and the name "emulated".
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <vector>

#include "hardware.hpp"
#include "kernels.hpp"

namespace emulated::accelerator {

constexpr auto kind = c10::DeviceType::PrivateUse1;

const backend& this_backend();

// All four refer to the calling thread.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
stream& stream_of(const c10::Stream& s);

/// An allocator that caches freed blocks for each stream. Blocks have the requested size, rounded up to 512 bytes.
c10::DeviceAllocator& device_allocator();
at::HostAllocator& pinned_allocator();

/// Memory of captured graphs. During the capture, its streams allocate from the pool.
void use_pool(unsigned long long capture, c10::MempoolId_t pool);
void leave_pool(unsigned long long capture);
/// Ends the use of the pool by one graph. After the last graph, the memory of the pool is not reused.
void release_pool(c10::MempoolId_t pool);

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator make_generator(c10::DeviceIndex device);
std::function<philox()> draw(const at::Generator& given, c10::DeviceIndex device);

/// The draws of a captured graph from one generator.
class captured_draws {
 public:
  /// Reserves the draws of one replay. @return work for the stream, to be run before the replay
  std::function<void()> advance() const;
  at::Generator from;
  struct base {
    philox now;
    std::uint64_t used = 0;
  };
  std::shared_ptr<base> state;
};
/// All draws of a capture that has ended.
std::vector<captured_draws> draws_of_capture(unsigned long long capture);

}  // namespace emulated::accelerator
