// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is asked of the system for files. Private to the adapter.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace remat::pytorch {

/// Calls that may fail at any time; tests put others in their place. Errors as those of the system: -1 and `errno`.
struct file_calls {
  ssize_t (*read)(int file, void* to, std::size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* from, std::size_t bytes, off_t offset);
  int (*allocate)(int file, int mode, off_t offset, off_t bytes);
  int (*open)(const char* path, int flags, mode_t mode);
};
file_calls& files_of_system();

}  // namespace remat::pytorch
