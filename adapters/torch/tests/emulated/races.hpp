// SPDX-License-Identifier: Apache-2.0
/// @file
/// The detector of races. It records the last uses of all bytes, and checks that each is ordered before the next use. It
/// considers only what streams, events and waits of the host guarantee, never time, so it finds a race in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

/// For each stream, the number of its jobs that are known to be done.
class vector_clock {
 public:
  void merge(const vector_clock& other);
  std::uint64_t of(int stream) const;
  std::uint64_t tick(int stream);  ///< counts one more job of the stream

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

/// For each used byte, its last writer and the readers since then.
class history {
 public:
  using report = std::function<void(std::string)>;

  /// Records a read by `who`. `now` are the jobs known to be done when it starts, itself included.
  void read(const void* begin, std::size_t bytes, const epoch& who, const vector_clock& now, const report& race);
  void write(const void* begin, std::size_t bytes, const epoch& who, const vector_clock& now, const report& race);
  void forget(const void* begin, std::size_t bytes);

 private:
  using address = std::uintptr_t;
  struct segment {
    address end;
    epoch writer;
    std::vector<epoch> readers;  ///< at most one per stream
  };
  using segments = std::map<address, segment>;

  /// Splits the segment that contains `at`.
  void split(address at);
  void join_with_previous(segments::iterator s);

  segments segments_;
};

}  // namespace emulated
