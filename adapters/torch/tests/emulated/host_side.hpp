// SPDX-License-Identifier: Apache-2.0
/// @file
/// The tensors of one call as the host's kernels see them: the same bytes at addresses that the host may use.
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

/// Memory of the host for the results of a kernel that is captured.
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

/// While it lives, what the calling thread allocates for the host comes from the allocator of the device.
class inside_kernel {
 public:
  /// Every piece is added to `used`.
  /// @param blank not null: the kernel gets this memory, and the device's stays as it is
  inside_kernel(const backend& on, std::vector<range>& used, blank_memory* blank = nullptr);
  ~inside_kernel();
  inside_kernel(const inside_kernel&) = delete;
  inside_kernel& operator=(const inside_kernel&) = delete;

 private:
  const backend* outer_;
  std::vector<range>* outer_used_;
  blank_memory* outer_blank_;
};

/// Gives up what a kernel has allocated at an address of kernels: it is the device's from now on. None: not allocated by a
/// kernel.
std::optional<c10::DataPtr> taken_from_kernel(void* kernel_address);

/// From the first to the last byte that a tensor can reach. Addresses are those of devices.
range extent(const at::Tensor& t);

/// Maps tensors of the device to tensors of the host and back, for one call.
class host_side {
 public:
  /// `blank`: kernels see zeros instead of the bytes of the device, and change nothing there.
  host_side(c10::Device device, const backend& on, bool blank) : device_(device), on_(on), blank_(blank) {}

  bool of_device(const at::Tensor& t) const { return t.defined() && t.device().type() == on_.type(); }
  /// Other tensors stay as they are.
  at::Tensor to_host(const at::Tensor& t);
  /// All tensors, devices and storages in it. Generators stay.
  c10::IValue to_host(const c10::IValue& v);
  /// A result. It takes over what the kernel allocated for it.
  at::Tensor to_device(const at::Tensor& t);
  c10::IValue to_device(const c10::IValue& v);
  /// Tells a tensor that the kernel may have resized what its counterpart has become.
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
  /// Of the argument in a storage of the host: in inference mode, a view of a normal tensor is a normal tensor.
  std::map<c10::StorageImpl*, c10::DispatchKeySet> keys_of_views_;
  std::vector<c10::Storage> hosts_;  ///< alive, so that no address in `given_` comes twice
};

}  // namespace emulated
