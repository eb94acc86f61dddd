// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of the caller as blocks that links read, and regions as storages that callers hold. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// Bytes [offset, offset + bytes) of a region as a storage. The storage holds the region.
inline c10::Storage storage_in(const std::shared_ptr<region>& r, bytes_t offset, bytes_t bytes) {
  c10::DataPtr place(
      r->data() + offset, new std::shared_ptr<region>(r), [](void* p) { delete static_cast<std::shared_ptr<region>*>(p); },
      r->on());
  return {c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes), std::move(place), nullptr, false};
}

/// Bytes [offset, offset + bytes) of the storage of `t`, as a block that a link can read. The block holds the storage. A tensor
/// on a disk is read from its file, so a disk that fails is a `copy_failed` and not a signal, and no pages are mapped.
/// @param leaves pages read from a disk leave the page cache at once
/// @throws broken_contract if `t` is not on the host
block home_of(const at::Tensor& t, bytes_t offset, bytes_t bytes, bool leaves);

/// Tells which tensors should bypass the page cache, because memory is short. They lie on disks, and are read in a fixed order
/// again and again. A cyclic access pattern larger than the cache gets no hits (LRU thrashing); without these tensors, the others
/// fit.
/// @param read the tensors, in the order of their reads
/// @return per tensor: its pages leave the cache as soon as they have been read
std::vector<bool> tensors_to_evict(const std::vector<at::Tensor>& read);

/// The share of a measured rate that plans rely on. Links of an accelerator are steady; copying threads and disks have other
/// work.
inline double reliable_share(const device& d, const link& by) { return by.joins_graphs_of(d.which()) ? 0.98 : 0.9; }

/// Slowdown of kernels by copies that run at the same time.
struct interference {
  double factor = 1;  ///< time of a memory-bound kernel beside copies, relative to its time alone
  double rate = 0;    ///< rate at which that kernel alone reads and writes memory, bytes / s
};
/// Measures the slowdown with copies in both directions at once. Takes 3 * `sample` bytes of the device, and
/// 2 * `sample` bytes of far memory.
/// @param d     an accelerator
/// @param rates of `far`
/// @throws out_of_memory, copy_failed
interference measure_interference(device& d, const far_memory& far, const copy_rates& rates, bytes_t sample);

/// Measures the rate at which plans can rely on `in` to bring `weights` to `d`: the share `reliable_share` of the rate for a
/// sample. Weights that would not stay in the page cache are read from their disk. The rate to the host is reported as equal.
/// @param weights not empty, none without elements
/// @throws out_of_memory, copy_failed
copy_rates measure_fetches(device& d, link& in, const std::vector<at::Tensor>& weights);

}  // namespace remat::pytorch
