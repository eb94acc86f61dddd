// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of the caller as something that links read, and regions as memory that callers hold. Private to the adapter.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include <remat/pytorch/device.hpp>

namespace remat::pytorch {

/// Bytes [offset, offset + bytes) of a region as a storage, which holds the region.
inline c10::Storage storage_in(const std::shared_ptr<region>& r, bytes_t offset, bytes_t bytes) {
  c10::DataPtr place(
      r->data() + offset, new std::shared_ptr<region>(r), [](void* p) { delete static_cast<std::shared_ptr<region>*>(p); },
      r->on());
  return {c10::Storage::use_byte_size_t(), static_cast<std::size_t>(bytes), std::move(place), nullptr, false};
}

/// Bytes [offset, offset + bytes) of the storage of `t`, which is held meanwhile, for a link to read. What is on a disk is read
/// from its file, so that a disk that fails is a `copy_failed` and no signal, and pages are mapped into nobody's memory.
/// @param leaves pages of a disk leave the system's cache as soon as they have been read
/// @throws broken_contract if it is not in memory of the host
block home_of(const at::Tensor& t, bytes_t offset, bytes_t bytes, bool leaves);

/// Tells which tensors should bypass the page cache, because memory is short. They lie on disks, and are read in a fixed order
/// again and again. A cyclic access pattern larger than the cache gets no hits (LRU thrashing); without these tensors, the others
/// fit.
/// @param read the tensors, in the order of their reads
/// @return per tensor: its pages leave the cache as soon as they have been read
std::vector<bool> let_go_of(const std::vector<at::Tensor>& read);

/// The part of a measured rate that plans rely on. Links of an accelerator are steady. Threads that copy, and disks, have other
/// work.
inline double relied_on(const device& d, const link& by) { return by.joins_graphs_of(d.which()) ? 0.98 : 0.9; }

/// What copies do to kernels that run meanwhile.
struct interference {
  double factor = 1;  ///< by which a kernel takes longer that does nothing but read and write memory
  double rate = 0;    ///< at which it does that alone, bytes / s
};
/// Copies run in both directions at once. Takes three times `sample` bytes of the device, and twice of far memory.
/// @param d     an accelerator
/// @param rates of `far`
/// @throws out_of_memory, copy_failed
interference measure_interference(device& d, const far_memory& far, const copy_rates& rates, bytes_t sample);

/// Rates at which `in` can be relied on to bring `weights` to `d`, from a disk if they would not stay in the system's cache: the
/// part of what some of them reach that `relied_on` tells. To the host it is said to be as fast.
/// @param weights not empty, none without elements
/// @throws out_of_memory, copy_failed
copy_rates measure_fetches(device& d, link& in, const std::vector<at::Tensor>& weights);

}  // namespace remat::pytorch
