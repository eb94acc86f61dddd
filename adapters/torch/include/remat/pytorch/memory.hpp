// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of host tensors: counting live bytes, recording the allocations of a call, and placing planned allocations.
///
/// `install` puts an allocator in front of PyTorch's allocator for the host. It counts bytes. On threads that ask for it, it
/// records allocations or serves them from an arena. All other allocations go to the allocator that was there before.
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
/// On a thread with an active plan or recording, that plan or recording handles allocations. Elsewhere PyTorch's blocks are
/// passed on unchanged, unless a `meter` counts. A process may fork at any time.
class placing_allocator {
 public:
  /// Installs the allocator; further calls do nothing. Every class that needs the allocator calls it.
  static void install();
  /// True if no other allocator has been put in front of this one since.
  static bool in_front();
};

/// Counts the bytes of host tensors in the process while a meter exists: blocks allocated in this time, and all arenas.
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
  /// Sets the peak to the bytes alive now.
  static void reset_peak();
  /// Raises the peak to an earlier one that is higher. bytes
  static void raise_peak(bytes_t to);
  /// Sets an observer of the live bytes, or removes it.
  /// @param f called with the live bytes after every change, on the thread of the change, one call at a time, except for its own
  ///          changes; must not fork or call `observe`. Empty: no observer
  static void observe(std::function<void(bytes_t)> f);
};

/// A region of host memory for planned allocations.
class arena final : public region {
 public:
  /// Alignment of the address and the size of every arena, bytes.
  static constexpr std::size_t alignment = 4096;

  /// @param bytes size, >= 0; the meter counts it
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

/// An allocation during an `allocation_recording`.
struct recorded_block {
  bytes_t bytes = 0;
  int born = 0;    ///< position of the birth among all births and deaths
  int freed = -1;  ///< position of the death among all births and deaths; -1: alive at the end
  const void* data = nullptr;
};

/// Records the allocations of this thread on a device between `start` and `stop`; other threads are not affected.
class allocation_recording {
 public:
  explicit allocation_recording(c10::Device on = c10::kCPU) : on_(on) { placing_allocator::install(); }
  ~allocation_recording() { stop(); }
  allocation_recording(const allocation_recording&) = delete;
  allocation_recording& operator=(const allocation_recording&) = delete;

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
    off_plan_ = false;
    live_temporaries_.clear();
    unplanned_blocks_.clear();
    live_unplanned_ = peak_unplanned_ = 0;
  }
  void start() override;
  void stop() override;
  bool finished() const override { return live_temporaries_.empty(); }
  std::size_t unplanned_allocations() const override { return unplanned_allocations_; }
  bytes_t unplanned_bytes() const override;

  c10::Device on() const { return on_; }
  /// True if allocations on stream `s` may lie in the arena. Allocations on other streams must not.
  virtual bool follows(c10::Stream) const { return true; }
  std::optional<char*> place(bytes_t bytes);   ///< for the allocator: address of the next allocation; nothing if unplanned
  void born(const void* data, bytes_t bytes);  ///< for the allocator: a block that it has placed itself
  void died(const void* data);                 ///< for the allocator

 private:
  c10::Device on_;
  std::span<const planned_block> blocks_;
  std::size_t next_ = 0;
  int deaths_ = 0;
  std::vector<const void*> live_temporaries_;  ///< addresses of live blocks that die before the plan ends
  bool off_plan_ = false;
  std::unordered_map<const void*, bytes_t> unplanned_blocks_;  ///< live blocks outside the plan
  bytes_t live_unplanned_ = 0, peak_unplanned_ = 0;            ///< their bytes: now, at most
  std::atomic<std::size_t> unplanned_allocations_ = 0;         ///< atomic, as other threads read it
};

/// While it lives, allocations of this thread follow no plan: code of the caller runs inside of a planned step.
class outside_of_plan {
 public:
  outside_of_plan();
  ~outside_of_plan();
  outside_of_plan(const outside_of_plan&) = delete;
  outside_of_plan& operator=(const outside_of_plan&) = delete;

 private:
  planned_allocations* before_;
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
