// SPDX-License-Identifier: Apache-2.0
/// @file
/// What allocators and arenas tell each other. Private to the adapter.
#pragma once

#include <remat/core/problem.hpp>
#include <remat/pytorch/memory.hpp>

namespace remat::pytorch::detail {

/// What is active on this thread for allocations on a kind of device; null: nothing.
pytorch::recording* recording_on(c10::DeviceType on);
pytorch::planned_allocations* plan_on(c10::DeviceType on);

/// Tells the meter of bytes that come or go.
void count(bytes_t change);
/// Blocks between these addresses are not given back to the system.
void add_arena(const char* data, bytes_t bytes);
void remove_arena(const char* data);
bool in_arena(const void* data);

}  // namespace remat::pytorch::detail
