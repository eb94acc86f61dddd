// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is asked of the system for files. Private to the adapter.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// Calls that may fail at any time; tests put others in their place. Errors as those of the system: -1 and `errno`.
struct file_calls {
  ssize_t (*read)(int file, void* to, std::size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* from, std::size_t bytes, off_t offset);
  int (*allocate)(int file, int mode, off_t offset, off_t bytes);
  int (*open)(const char* path, int flags, mode_t mode);
  int (*write_back)(int file, off_t offset, off_t bytes);  ///< what is dirty there, to the disk
  int (*populate)(void* begin, std::size_t bytes);         ///< reads mapped pages that are about to be written
};
file_calls& files_of_system();

/// Opens a file in `folder` that has no name, is readable by nobody else, and is gone when it is closed, however the process
/// ends.
/// @param direct  copies should pass the system's cache by; they do not where the file system has no such way
/// @return its descriptor, closed by `exec`; the caller closes it
/// @throws bad_option naming the folder and the system's reason; out_of_memory if the disk is full
int open_nameless_file(const std::string& folder, bool direct = false);

/// A file that is mapped. Its pages are in memory as far as the system likes; `write` does not go through the mapping.
class mapped_region : public region {
 public:
  /// Brings pages into memory: `offset` is that of one, as `bytes` are of whole ones, in `evict` too.
  /// @throws copy_failed; an access to the pages would have killed the process
  virtual void fetch(bytes_t offset, bytes_t bytes) = 0;
  /// Has the system begin with that.
  virtual void expect(bytes_t offset, bytes_t bytes) = 0;
  /// Reads what will not be read again for long, and leaves none of it in the system's cache: past that, where the file system
  /// can do so and address, offset and bytes are whole units of 4096.
  /// @throws copy_failed
  virtual void read_once(char* to, bytes_t offset, bytes_t bytes) = 0;
  /// Writes pages to the disk and takes them out of memory.
  /// @throws copy_failed, and they are still there
  virtual void evict(bytes_t offset, bytes_t bytes) = 0;
};

/// Files as those of `file_memory`, but through the system's cache; all its regions are `mapped_region`s, and zero.
/// @throws bad_option
std::shared_ptr<tier> mapped_files(const std::string& folder, bytes_t limit);

}  // namespace remat::pytorch
