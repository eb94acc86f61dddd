// SPDX-License-Identifier: Apache-2.0
/// @file
/// What allocators and arenas tell each other. Private to the adapter.
#pragma once

#include <remat/core/problem.hpp>
#include <remat/pytorch/memory.hpp>

namespace remat::pytorch::detail {

/// What is active on this thread for allocations on a device; null: nothing.
pytorch::recording* recording_on(c10::Device on);
pytorch::planned_allocations* plan_on(c10::Device on);
/// A block of an accelerator has died on this thread.
void died_on(c10::DeviceType kind, const void* data);

/// Sets who returns idle arenas when PyTorch runs out of memory on a device. @param f says whether it returned something
void set_idle_arenas(bool (*f)(c10::Device on));
/// @return something was returned
bool return_idle_arenas(c10::Device on);

/// While it lives, the meter does not count what its thread allocates on the host.
class uncounted {
 public:
  uncounted();
  ~uncounted();
  uncounted(const uncounted&) = delete;
  uncounted& operator=(const uncounted&) = delete;

 private:
  bool before_;
};

/// Tells the meter of bytes that come or go.
void count(bytes_t change);
/// Blocks between these addresses are not given back to the system.
void add_arena(const char* data, bytes_t bytes);
void remove_arena(const char* data);
bool in_arena(const void* data);

}  // namespace remat::pytorch::detail
