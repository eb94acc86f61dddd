// SPDX-License-Identifier: Apache-2.0
/// @file
/// What Python's own modules cannot ask of the system for mapped files: without the GIL, so that it goes on beside the kernels.
#pragma once

#include <fcntl.h>
#include <malloc.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace remat::python {

/// Calls without the GIL until it is done; raises OSError for what `call` leaves in `errno` with -1.
template <class Call>
void without_gil(const Call& call) {
  int failed = 0;
  {
    pybind11::gil_scoped_release free;
    while (call() < 0)
      if (errno != EINTR && errno != EAGAIN) {
        failed = errno;
        break;
      }
  }
  if (failed == 0) return;
  errno = failed;
  PyErr_SetFromErrno(PyExc_OSError);
  throw pybind11::error_already_set();
}

/// Reads mapped pages that are about to be written, so that a disk that fails is an error and not the signal SIGBUS.
/// A system that cannot do that leaves it to the access itself.
/// @param address of a page
inline void populate(std::uintptr_t address, std::size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  constexpr int advice = MADV_POPULATE_WRITE;
#else
  constexpr int advice = 23;  // Linux 5.14, also where the headers are older
#endif
  without_gil([&] {
    const int result = madvise(reinterpret_cast<void*>(address), bytes, advice);  // NOLINT(performance-no-int-to-ptr)
    if (result == 0 || errno == EINVAL) return 0;
    if (errno == EFAULT) errno = EIO;  // an access would have raised SIGBUS
    return -1;
  });
}

/// Has what is dirty in bytes [offset, offset + bytes) of a file written to its disk.
inline void write_back(int file, std::int64_t offset, std::int64_t bytes) {
  without_gil([&] {
    const int result =
        sync_file_range(file, offset, bytes, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    return result < 0 && (errno == ENOSYS || errno == EINVAL || errno == ESPIPE) ? fdatasync(file) : result;
  });
}

/// Copies memory into a file.
inline void write(int file, std::uintptr_t from, std::size_t bytes, std::int64_t offset) {
  std::size_t done = 0;
  without_gil([&] {
    while (done < bytes) {
      const auto moved = pwrite(file, reinterpret_cast<const char*>(from) + done,  // NOLINT(performance-no-int-to-ptr)
                                std::min<std::size_t>(bytes - done, 16 << 20), offset + static_cast<std::int64_t>(done));
      if (moved < 0) return -1;
      done += static_cast<std::size_t>(moved);
    }
    return 0;
  });
}

/// Gives memory that has been freed back to the system, where the C library can do that.
inline void trim() {
#ifdef __GLIBC__
  const pybind11::gil_scoped_release free;
  malloc_trim(0);
#endif
}

}  // namespace remat::python
