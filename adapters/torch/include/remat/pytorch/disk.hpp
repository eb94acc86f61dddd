// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tensors that lie on a disk.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// A folder whose disk holds tensors.
///
/// They are ordinary tensors of the host, mapped from files that have no name, are readable by nobody else, and are gone with
/// the last tensor in them, however the process ends. All space is set aside when they are made. The system takes their pages
/// out of memory when it needs room, so that they count for no budget, and brings them back when they are read; `fetch` and
/// `evict` do that in time, and tell of a disk that fails, which kills the process otherwise.
///
/// Thread-safe. Files belong to the process that made them: one that is forked later may read the tensors.
class disk {
 public:
  /// @param folder on the disk that is meant
  /// @param limit  bytes reserved at a time, >= 0
  /// @throws bad_option naming the folder if no file can be made there; out_of_memory if the disk is full
  explicit disk(const std::string& folder, bytes_t limit = max_bytes);

  /// Tensors like these on the disk, in one file; they are zero. Those without elements are in memory.
  /// @param like strided tensors, on any device, `meta` among them: sizes, strides and types count
  /// @throws out_of_memory, and nothing is taken; copy_failed in a process that was forked since
  std::vector<at::Tensor> reserve(const std::vector<at::Tensor>& like);

  /// Is `t` on this disk?
  bool holds(const at::Tensor& t) const;

  /// Copies to a tensor on this disk, faster than through its mapping: pages that have never been written fault slowly.
  /// @param to     held
  /// @param value  of the host, with the same sizes, strides and type
  /// @throws copy_failed; broken_contract
  void write(const at::Tensor& to, const at::Tensor& value);

  /// Puts the gradient of a parameter into a tensor on this disk, unless it is on it already. Other backwards add to it before or
  /// after that.
  /// @param home as for `write`
  /// @throws copy_failed; broken_contract
  void take_gradient(const at::Tensor& parameter, const at::Tensor& home);

  /// Brings tensors into memory. As the other two it takes tensors of any disks, their whole pages; there is nothing to do for
  /// others.
  /// @throws copy_failed
  static void fetch(const std::vector<at::Tensor>& tensors);
  /// Has the system begin with that.
  static void expect(const std::vector<at::Tensor>& tensors);
  /// Writes tensors to their disks and takes their pages out of memory.
  /// @throws copy_failed, and then they are still there
  static void evict(const std::vector<at::Tensor>& tensors);

  bytes_t reserved() const { return count_->reserved; }
  bytes_t fetched() const { return count_->fetched; }  ///< bytes, ever
  bytes_t evicted() const { return count_->evicted; }  ///< bytes, ever: what the disk wears by
  const std::string& folder() const { return folder_; }

  /// Bytes of a disk; tensors may outlive it.
  struct counts {
    std::atomic<bytes_t> reserved = 0, fetched = 0, evicted = 0;
  };

 private:
  std::string folder_;
  pid_t process_ = getpid();
  std::shared_ptr<tier> files_;
  std::shared_ptr<counts> count_ = std::make_shared<counts>();
};

/// Is `t` on any disk?
bool on_a_disk(const at::Tensor& t);

/// Is `t` on any disk, and large enough for plans to fetch it by itself? See `wrap_options::fetched`.
bool worth_fetching(const at::Tensor& t);

/// Do they have the same sizes, strides and type?
bool alike(const at::Tensor& a, const at::Tensor& b);

/// Can `t` be on a disk, and would that save a page of memory or more?
bool movable(const at::Tensor& t);

/// Fetches and evicts beside the computations; at most two evictions are under way. Thread-safe. In a process that is forked
/// nothing is under way.
class disk_traffic {
 public:
  using key = const void*;  ///< names what is fetched together

  disk_traffic() = default;
  /// Waits for what is under way.
  ~disk_traffic();
  disk_traffic(const disk_traffic&) = delete;
  disk_traffic& operator=(const disk_traffic&) = delete;

  /// Begins to fetch what `ready` will be asked for, unless that has begun.
  /// @param also expected besides
  void ahead(key of, std::vector<at::Tensor> tensors, std::vector<at::Tensor> also = {});
  /// Waits until they are in memory.
  /// @throws copy_failed
  void ready(key of, std::vector<at::Tensor> tensors);
  /// They have been written to, or are of no more use, and go to their disks.
  void done(std::vector<at::Tensor> tensors);
  /// Waits for all that is under way.
  void wait();
  /// Waits for what is being written.
  /// @throws copy_failed: the first that could not be since the last call
  void drain();

 private:
  std::unique_lock<std::mutex> begin();
  void collect();
  std::mutex mutex_;
  pid_t process_ = getpid();  ///< that `coming_` and `going_` are of
  std::map<key, std::future<void>> coming_;
  std::deque<std::future<void>> going_;
  std::exception_ptr failure_;  ///< the first of writing
};

}  // namespace remat::pytorch
