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
/// The tensors are ordinary tensors of the host in memory-mapped files. The files have no names, and only this process can read
/// them. A file goes with the last tensor in it, however the process ends. All disk space is allocated when tensors are made.
/// When memory runs short, the operating system evicts their pages and reads them back on demand. So they count for no budget.
/// `fetch` and `evict` move pages ahead of time. They also report a failing disk, which otherwise kills the process.
///
/// Thread-safe. Files belong to the process that made them; a process forked later may read the tensors.
class disk {
 public:
  /// @param folder a folder on the disk to use
  /// @param limit  largest number of bytes reserved at a time, >= 0
  /// @throws bad_option naming the folder if no file can be made there; out_of_memory if the disk is full
  explicit disk(const std::string& folder, bytes_t limit = max_bytes);

  /// Makes zero tensors like the given ones on the disk, in one file. Tensors without elements are made in memory.
  /// @param like dense strided tensors on any device, `meta` included; sizes, strides and types count
  /// @return one tensor per entry of `like`
  /// @throws out_of_memory, and nothing is reserved; copy_failed in a process forked since; broken_contract for gaps in a tensor
  std::vector<at::Tensor> reserve(const std::vector<at::Tensor>& like);

  /// True if `t` is on this disk.
  bool holds(const at::Tensor& t) const;

  /// Copies a tensor to a tensor on this disk. Faster than a write through the mapping, where new pages fault slowly.
  /// @param to    a tensor on this disk
  /// @param value a tensor of the host with the same sizes, strides and type
  /// @throws copy_failed; broken_contract
  void write(const at::Tensor& to, const at::Tensor& value);

  /// Moves the gradient of a parameter into a tensor on this disk, unless it is on this disk already. Other backwards may add to
  /// the gradient before or after the move, but not meanwhile.
  /// @param home as `to` of `write`
  /// @throws copy_failed; broken_contract
  void take_gradient(const at::Tensor& parameter, const at::Tensor& home);

  /// Reads tensors into memory. Like `expect` and `evict`, it moves whole pages of tensors on any disk and ignores all others.
  /// @throws copy_failed
  static void fetch(const std::vector<at::Tensor>& tensors);
  /// Asks the operating system to begin to read tensors.
  static void expect(const std::vector<at::Tensor>& tensors);
  /// Writes tensors to their disks and evicts their pages from memory.
  /// @throws copy_failed; the tensors are then still in memory
  static void evict(const std::vector<at::Tensor>& tensors);

  bytes_t reserved() const { return count_->reserved; }
  bytes_t fetched() const { return count_->fetched; }  ///< bytes fetched since construction
  bytes_t evicted() const { return count_->evicted; }  ///< bytes evicted since construction: the wear of the disk
  const std::string& folder() const { return folder_; }

  /// Counts of bytes. A separate object, as tensors may outlive the disk.
  struct counts {
    std::atomic<bytes_t> reserved = 0, fetched = 0, evicted = 0;
  };

 private:
  std::string folder_;
  pid_t process_ = getpid();
  std::shared_ptr<tier> files_;
  std::shared_ptr<counts> count_ = std::make_shared<counts>();
};

/// True if `t` is on any disk.
bool on_a_disk(const at::Tensor& t);

/// True if `t` is on any disk and has at least 64 KiB, so that a fetch by a plan pays. See `wrap_options::fetched`.
bool worth_fetching(const at::Tensor& t);

/// True if both tensors have the same sizes, strides and type.
bool alike(const at::Tensor& a, const at::Tensor& b);

/// True if `t` can be on a disk and has at least a page.
bool movable(const at::Tensor& t);

/// Fetches and evicts tensors beside the computations. At most two evictions are in flight. Thread-safe. A forked process begins
/// with nothing in flight.
class disk_traffic {
 public:
  using key = const void*;  ///< names a group of tensors that are fetched together

  disk_traffic() = default;
  /// Waits for all traffic in flight.
  ~disk_traffic();
  disk_traffic(const disk_traffic&) = delete;
  disk_traffic& operator=(const disk_traffic&) = delete;

  /// Begins to fetch a group of tensors before `ready` asks for it, unless its fetch is in flight.
  /// @param also further tensors, for `disk::expect`
  void ahead(key of, std::vector<at::Tensor> tensors, std::vector<at::Tensor> also = {});
  /// Waits until the tensors of a group are in memory.
  /// @throws copy_failed
  void ready(key of, std::vector<at::Tensor> tensors);
  /// Begins to evict tensors after their last use. Waits if two evictions are in flight.
  void done(std::vector<at::Tensor> tensors);
  /// Waits for all traffic in flight.
  void wait();
  /// Waits for all evictions.
  /// @throws copy_failed for the first eviction that failed since the last call
  void drain();

 private:
  std::unique_lock<std::mutex> begin();
  void collect();
  std::mutex mutex_;
  pid_t process_ = getpid();  ///< process of `coming_` and `going_`
  std::map<key, std::future<void>> coming_;
  std::deque<std::future<void>> going_;
  std::exception_ptr failure_;  ///< first failure of an eviction
};

}  // namespace remat::pytorch
