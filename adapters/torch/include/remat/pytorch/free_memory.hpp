// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much memory of the host this process may use.
#pragma once

#include <remat/core/types.hpp>

namespace remat::pytorch {

/// Memory of the machine, or the smallest limit of a memory cgroup (version 1 or 2) of this process, bytes. `max_bytes` where the
/// system does not tell.
bytes_t host_limit();

/// Bytes that this process can still allocate, within the machine and its memory cgroups. Memory that the system reclaims easily,
/// such as inactive page cache, counts as free.
bytes_t host_free();

}  // namespace remat::pytorch
