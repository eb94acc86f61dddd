// SPDX-License-Identifier: Apache-2.0
/// @file
/// The tensors of one call as kernels of the host see them: the same bytes, at addresses that the host may use.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "hardware.hpp"
#include "kernels.hpp"

namespace emulated {

/// Host memory for the results of a captured kernel.
class blank_memory {
 public:
  blank_memory() = default;
  ~blank_memory();
  blank_memory(const blank_memory&) = delete;
  blank_memory& operator=(const blank_memory&) = delete;
  void* allocate(std::size_t bytes);

 private:
  std::vector<std::unique_ptr<std::max_align_t[]>> pieces_;
};

/// While it lives, host allocations of the calling thread come from the allocator of the device.
class inside_kernel {
 public:
  /// @param used  gets each allocated piece
  /// @param blank if not null, the kernel gets this memory, and the memory of the device stays unchanged
  inside_kernel(const backend& on, std::vector<range>& used, blank_memory* blank = nullptr);
  ~inside_kernel();
  inside_kernel(const inside_kernel&) = delete;
  inside_kernel& operator=(const inside_kernel&) = delete;

 private:
  const backend* outer_;
  std::vector<range>* outer_used_;
  blank_memory* outer_blank_;
};

/// Takes over a piece that a kernel has allocated at an address of kernels: from now on it belongs to the device. Nothing if no
/// kernel has allocated it.
std::optional<c10::DataPtr> taken_from_kernel(void* kernel_address);

/// The range from the first to the last byte that a tensor can reach, in addresses of the device.
range extent(const at::Tensor& t);

/// Maps tensors of the device to tensors of the host and back, for one call.
class host_side {
 public:
  /// @param blank kernels see zeros instead of the bytes of the device, and leave the device unchanged
  host_side(c10::Device device, const backend& on, bool blank) : device_(device), on_(on), blank_(blank) {}

  bool of_device(const at::Tensor& t) const { return t.defined() && t.device().type() == on_.type(); }
  /// Tensors that are not on the device are returned unchanged.
  at::Tensor to_host(const at::Tensor& t);
  /// Maps all tensors, devices and storages in `v`. Generators stay.
  c10::IValue to_host(const c10::IValue& v);
  /// Maps a result, which takes over the memory that the kernel allocated for it.
  at::Tensor to_device(const at::Tensor& t);
  c10::IValue to_device(const c10::IValue& v);
  /// Updates a tensor of the device if the kernel has resized its counterpart on the host.
  void follow(const at::Tensor& of_device, const at::Tensor& of_host);

 private:
  struct lent {
    c10::Storage host, device;
    void* data;  ///< at the start of the call
  };
  c10::Storage lend(const c10::Storage& s);
  c10::Storage keep(const c10::Storage& s);
  void copy_layout(const at::Tensor& from, const at::Tensor& to) const;

  c10::Device device_;
  const backend& on_;
  bool blank_;
  std::map<c10::StorageImpl*, lent> lent_;           ///< by the device's storage
  std::map<c10::StorageImpl*, c10::Storage> given_;  ///< by the host's storage
  /// Dispatch keys of the argument in a storage of the host: in inference mode, a view of a normal tensor is a normal tensor.
  std::map<c10::StorageImpl*, c10::DispatchKeySet> keys_of_views_;
  std::vector<c10::Storage> hosts_;  ///< kept alive, so that addresses in `given_` stay unique
};

}  // namespace emulated
