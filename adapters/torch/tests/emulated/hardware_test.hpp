// SPDX-License-Identifier: Apache-2.0
/// @file
/// Helpers of the hardware tests: objects that end with a scope, and jobs that only access memory.
#pragma once

#include <cstddef>

#include "hardware.hpp"

namespace emulated::testing {

/// Sets an option for a scope. Counts and failures start anew.
struct with {
  with(const char* option, long value) : name(option), before(option::get(option)) {
    option::set(name, value);
    reset_counts();
  }
  ~with() {
    option::set(name, before);
    reset_counts();
    clear_failures();
  }
  const char* name;
  long before;
};

struct fresh {
  fresh() {
    reset_counts();
    clear_failures();
  }
};

struct own_stream {
  explicit own_stream(int device = 0) : s(make_stream(device)) {}
  ~own_stream() { destroy(s); }
  operator stream&() { return s; }
  stream& s;
};

struct device_memory {
  explicit device_memory(std::size_t bytes = 1024, int device = 0) : data(allocate(device, bytes)), size(bytes) {}
  ~device_memory() { release(data); }
  range whole() const { return {data, size}; }
  range part(std::size_t from, std::size_t bytes) const { return {static_cast<char*>(data) + from, bytes}; }
  int* values() const { return reinterpret_cast<int*>(kernel_address(data)); }
  void* data;
  std::size_t size;
};

struct pinned {
  explicit pinned(std::size_t bytes) : data(allocate_pinned(bytes)) {}
  ~pinned() { release_pinned(data); }
  int* values() const { return static_cast<int*>(data); }
  void* data;
};

inline void write(stream& s, range r, const char* name = "writer") {
  enqueue(s, {name, {}, {r}, [] {}});
}
inline void read(stream& s, range r, const char* name = "reader") {
  enqueue(s, {name, {r}, {}, [] {}});
}
inline long races() { return counted().races; }

}  // namespace emulated::testing
