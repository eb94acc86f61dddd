// SPDX-License-Identifier: Apache-2.0
/// @file
/// The memory of tensors: what is alive, what a call allocates, and where planned allocations go.
///
/// `install` puts an allocator in front of the one that PyTorch uses for the host. It counts, and on threads that ask for it
/// records allocations or answers them from an arena; everything else goes on to the allocator that was there before.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// The allocator of host memory that stands in front of PyTorch's.
///
/// On a thread where a plan or a recording is active it answers from that. Elsewhere it hands out what PyTorch's allocator gives
/// as it is, unless a `meter` counts. A process may fork at any time.
class placing_allocator {
 public:
  /// Puts it in place; further calls do nothing. Everything that needs it calls it by itself.
  static void install();
  /// No other allocator has been put in front of it since.
  static bool in_front();
};

/// Counts the bytes of host tensors in the process while at least one meter exists: blocks allocated since then, and all arenas.
class meter {
 public:
  meter();
  ~meter();
  meter(const meter&) = delete;
  meter& operator=(const meter&) = delete;

  /// Counts from now on, to the end of the process.
  static void install();
  static bytes_t live();
  static bytes_t peak();
  /// Makes the peak what is alive now.
  static void reset_peak();
  /// Calls `f` with the live bytes after every change, on the thread that makes it, one at a time; an empty `f` ends that.
  /// It must not fork.
  static void observe(std::function<void(bytes_t)> f);
};

/// Memory of the host that planned allocations lie in.
class arena final : public region {
 public:
  /// Address and size of every arena are multiples of it, bytes.
  static constexpr std::size_t alignment = 4096;

  /// @param bytes size, >= 0; counted by the meter
  /// @throws out_of_memory if the system has no memory left
  explicit arena(bytes_t bytes);
  ~arena() override;
  arena(const arena&) = delete;
  arena& operator=(const arena&) = delete;

  char* data() const override { return data_; }
  bytes_t bytes() const override { return bytes_; }
  bytes_t resident() const override { return counted_; }
  /// Gives the pages outside of `ranges` back to the system and the meter.
  void discard_except(std::vector<std::pair<bytes_t, bytes_t>> ranges) override;

 private:
  char* data_ = nullptr;
  bytes_t bytes_ = 0, counted_ = 0;
  std::size_t reserved_ = 0;
};

/// An allocation that happened while a `recording` was active.
struct recorded_block {
  bytes_t bytes = 0;
  int born = 0;    ///< position among the births and deaths
  int freed = -1;  ///< the same, or -1: still there at the end
  const void* data = nullptr;
};

/// Writes down the allocations of this thread on a device between `start` and `stop`; other threads are not affected.
class recording {
 public:
  explicit recording(c10::Device on = c10::kCPU) : on_(on) { placing_allocator::install(); }
  ~recording() { stop(); }
  recording(const recording&) = delete;
  recording& operator=(const recording&) = delete;

  void start();
  void stop();
  c10::Device on() const { return on_; }
  const std::vector<recorded_block>& blocks() const { return blocks_; }
  /// Births and deaths so far.
  int events() const { return events_; }

  void born(const void* data, bytes_t bytes);  ///< for the allocator
  void died(const void* data);                 ///< for the allocator

 private:
  c10::Device on_;
  std::vector<recorded_block> blocks_;
  std::unordered_map<const void*, std::size_t> alive_;
  int events_ = 0;
};

/// The `placement` of the host; accelerators derive from it.
class planned_allocations : public placement {
 public:
  explicit planned_allocations(c10::Device on = c10::kCPU) : on_(on) { placing_allocator::install(); }
  ~planned_allocations() override { stop(); }
  planned_allocations(const planned_allocations&) = delete;
  planned_allocations& operator=(const planned_allocations&) = delete;

  bool in_front() const override { return placing_allocator::in_front(); }
  void plan(std::span<const planned_block> blocks) override {
    blocks_ = blocks;
    next_ = 0;
    deaths_ = 0;
    strayed_ = false;
    mortal_.clear();
  }
  void start() override;
  void stop() override;
  bool finished() const override { return mortal_.empty(); }
  std::size_t unplanned() const override { return unplanned_; }

  c10::Device on() const { return on_; }
  /// Allocations on `s` lie in the arena: those on another stream must not.
  virtual bool follows(c10::Stream) const { return true; }
  std::optional<char*> place(bytes_t bytes);  ///< for the allocator: nothing if unplanned
  void died(const void* data);                ///< for the allocator

 private:
  c10::Device on_;
  std::span<const planned_block> blocks_;
  std::size_t next_ = 0;
  int deaths_ = 0;
  std::vector<const void*> mortal_;  ///< places given to blocks that are still to die
  bool strayed_ = false;
  std::atomic<std::size_t> unplanned_ = 0;  ///< read by other threads, too
};

/// State of the default generator of the host.
struct generator_state {
  at::mt19937 engine;
  std::optional<float> normal_float;
  std::optional<double> normal_double;

  static generator_state now();
  void restore() const;
  friend bool operator==(const generator_state& a, const generator_state& b);
};

}  // namespace remat::pytorch
