// SPDX-License-Identifier: Apache-2.0
/// @file
/// The detector of races: who used which bytes last, and whether that is ordered before the next use. It looks at what streams,
/// events and waits of the host guarantee, never at time, so it finds a race in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

/// For each stream, how many of its jobs are known to be done.
class vector_clock {
 public:
  void merge(const vector_clock& other);
  std::uint64_t of(int stream) const;
  std::uint64_t tick(int stream);  ///< one more job of the stream

 private:
  std::vector<std::uint64_t> counts_;
};

/// One job: the `count`-th of its stream.
struct epoch {
  int stream = -1;
  std::uint64_t count = 0;
  std::shared_ptr<const std::string> name;

  bool before(const vector_clock& now) const { return stream < 0 || count <= now.of(stream); }
  bool operator==(const epoch& other) const { return stream == other.stream && count == other.count; }
};

/// The last writer and the readers since then, for each byte that has been used.
class history {
 public:
  using report = std::function<void(std::string)>;

  /// `who` reads; `now` is what is known to be done when it starts, itself included.
  void read(const void* begin, std::size_t bytes, const epoch& who, const vector_clock& now, const report& race);
  void write(const void* begin, std::size_t bytes, const epoch& who, const vector_clock& now, const report& race);
  void forget(const void* begin, std::size_t bytes);

 private:
  using address = std::uintptr_t;
  struct segment {
    address end;
    epoch writer;
    std::vector<epoch> readers;  ///< at most one of each stream
  };
  using segments = std::map<address, segment>;

  /// Makes `at` a border of segments.
  void split(address at);
  void join_with_previous(segments::iterator s);

  segments segments_;
};

}  // namespace emulated
