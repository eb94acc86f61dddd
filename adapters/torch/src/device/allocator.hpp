// SPDX-License-Identifier: Apache-2.0
/// @file
/// Calls between allocators and arenas. Private to the adapter.
#pragma once

#include <remat/core/problem.hpp>
#include <remat/pytorch/memory.hpp>

namespace remat::pytorch::detail {

/// The recording or plan that is active on this thread for allocations on a device; null: none.
pytorch::allocation_recording* recording_on(c10::Device on);
pytorch::planned_allocations* plan_on(c10::Device on);
/// Tells the active plan and recording of this thread that a block of an accelerator was freed.
void died_on(c10::DeviceType kind, const void* data);

/// Sets the function that returns idle arenas when PyTorch runs out of memory on a device.
/// @param f returns true if it freed memory
void set_idle_arenas(bool (*f)(c10::Device on));
/// Calls that function. @return true if it freed memory
bool return_idle_arenas(c10::Device on);

/// While it lives, the meter does not count host allocations of its thread.
class uncounted {
 public:
  uncounted();
  ~uncounted();
  uncounted(const uncounted&) = delete;
  uncounted& operator=(const uncounted&) = delete;

 private:
  bool before_;
};

/// Adds `change` bytes to the meter.
void count(bytes_t change);
/// Registers an arena: blocks between its addresses are not given back to the system.
void add_arena(const char* data, bytes_t bytes);
void remove_arena(const char* data);
bool in_arena(const void* data);

}  // namespace remat::pytorch::detail
