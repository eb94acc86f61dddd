// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much memory of the host this process may take.
#pragma once

#include <remat/core/types.hpp>

namespace remat::pytorch {

/// Bytes that this process can take at most: what the machine has, or a memory cgroup that it is in (version 1 or 2) allows.
/// `max_bytes` where the system does not tell.
bytes_t host_limit();

/// Bytes that it can take on top of what is taken already; what is easily given back, as caches of files are, is free.
bytes_t host_free();

}  // namespace remat::pytorch
