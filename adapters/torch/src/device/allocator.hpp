// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the host's allocator and its arenas tell each other. Private to the adapter.
#pragma once

#include <remat/core/problem.hpp>

namespace remat::pytorch::detail {

/// Tells the meter of bytes that come or go.
void count(bytes_t change);
/// Blocks between these addresses are not given back to the system.
void add_arena(const char* data, bytes_t bytes);
void remove_arena(const char* data);

}  // namespace remat::pytorch::detail
