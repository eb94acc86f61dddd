// SPDX-License-Identifier: Apache-2.0
/// @file
/// Returns memory that the C library keeps. Private to the adapter.
#pragma once

#include <malloc.h>

#include <atomic>

#include <remat/core/types.hpp>

namespace remat::pytorch {

/// Notes that about `bytes` bytes have been freed. After every 32 MiB, returns to the system what the C library has kept, if it
/// can. While operators with large results run one after another, that may be more than a whole step takes.
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
