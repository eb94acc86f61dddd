// SPDX-License-Identifier: Apache-2.0
/// @file
/// System calls for files. Private to the adapter.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// System calls that may fail at any time; tests replace them. Errors are those of the system: -1 and `errno`.
struct file_calls {
  ssize_t (*read)(int file, void* to, std::size_t bytes, off_t offset);
  ssize_t (*write)(int file, const void* from, std::size_t bytes, off_t offset);
  int (*allocate)(int file, int mode, off_t offset, off_t bytes);
  int (*open)(const char* path, int flags, mode_t mode);
  int (*write_back)(int file, off_t offset, off_t bytes);  ///< writes dirty pages to the disk
  int (*populate)(void* begin, std::size_t bytes);         ///< reads mapped pages in, ready to be written
};
file_calls& files_of_system();

/// Opens a file in `folder` that has no name. No other user can read it, and it is gone when it is closed, however the process
/// ends.
/// @param direct copies should bypass the page cache, where the file system supports that
/// @return its descriptor, closed by `exec`; the caller closes it
/// @throws bad_option naming the folder and the system's reason; out_of_memory if the disk is full
int open_nameless_file(const std::string& folder, bool direct = false);

/// A mapped file. The system decides which of its pages are in memory; `write` does not go through the mapping.
class mapped_region : public region {
 public:
  /// Brings pages into memory. `offset` and `bytes` are multiples of the page size, in `evict` too.
  /// @throws copy_failed where an access to the pages would have killed the process
  virtual void fetch(bytes_t offset, bytes_t bytes) = 0;
  /// Asks the system to begin reading pages.
  virtual void expect(bytes_t offset, bytes_t bytes) = 0;
  /// Reads bytes that are not needed again soon, and leaves none of them in the page cache. Bypasses the cache if the file system
  /// supports that, and address, offset and bytes are multiples of 4096.
  /// @throws copy_failed
  virtual void read_once(char* to, bytes_t offset, bytes_t bytes) = 0;
  /// Writes pages to the disk and takes them out of memory.
  /// @throws copy_failed; the pages are still in memory then
  virtual void evict(bytes_t offset, bytes_t bytes) = 0;
};

/// Files like those of `file_memory`, but through the page cache. All regions are `mapped_region`s, filled with zeros.
/// @throws bad_option
std::shared_ptr<tier> mapped_files(const std::string& folder, bytes_t limit);

}  // namespace remat::pytorch
