// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory that the C library keeps. Private to the adapter.
#pragma once

#include <malloc.h>

#include <atomic>

#include <remat/core/types.hpp>

namespace remat::pytorch {

/// Notes that about so many bytes have been freed, and now and then gives what the C library has kept back to the system, where
/// it can do that: as operators with large results run one after another, that may be more than a whole step takes.
inline void note_freed(bytes_t bytes) {
  static std::atomic<bytes_t> since = 0;
  constexpr bytes_t much = 32 << 20;
  if ((since += bytes) < much) return;
  since = 0;
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace remat::pytorch
