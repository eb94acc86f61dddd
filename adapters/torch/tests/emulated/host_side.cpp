// SPDX-License-Identifier: Apache-2.0
/// @file
/// Maps the storages and tensors of a call between device and host.
#include "host_side.hpp"

#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

namespace emulated {
namespace {

/// The address, even of a storage that must not be read.
void* address(const c10::Storage& s) { return s.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(); }

c10::DataPtr zeros(std::size_t bytes) {
  void* const data = bytes == 0 ? nullptr : std::calloc(bytes, 1);
  TORCH_CHECK(bytes == 0 || data != nullptr, "emulated: the host has no ", bytes, " bytes left");
  return {data, data, &std::free, c10::kCPU};
}

c10::DispatchKeySet keys(c10::DispatchKey of_device, const at::Tensor& like) {
  const c10::DispatchKeySet all(of_device);
  return like._is_zerotensor() ? all.add(c10::DispatchKey::ZeroTensor) : all;
}

}  // namespace

range extent(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.numel() == 0) return {nullptr, 0};
  auto* const data = static_cast<char*>(address(t.storage()));
  if (data == nullptr) return {nullptr, 0};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const auto item = static_cast<std::int64_t>(t.itemsize());
  return {device_address(data + t.storage_offset() * item), static_cast<std::size_t>((last + 1) * item)};
}

c10::Storage host_side::lend(const c10::Storage& s) {
  if (s.device_type() != on_.type()) return s;
  const auto known = lent_.find(s.unsafeGetStorageImpl());
  if (known != lent_.end()) return known->second.host;
  void* const there = address(s);
  TORCH_CHECK(there == nullptr || option::get("handles") == 0 || is_handle(there),
              "emulated: a tensor's memory begins at no handle");
  auto data = blank_ ? zeros(there == nullptr ? 0 : s.nbytes())
                     : c10::DataPtr(there == nullptr ? nullptr : kernel_address(there), c10::kCPU);
  void* const begin = data.get();
  c10::Storage h(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  lent_.emplace(s.unsafeGetStorageImpl(), lent{h, s, begin});
  given_.emplace(h.unsafeGetStorageImpl(), s);
  return h;
}

/// The device storage for a storage that a kernel made.
c10::Storage host_side::keep(const c10::Storage& s) {
  if (const auto known = given_.find(s.unsafeGetStorageImpl()); known != given_.end()) return known->second;
  c10::DataPtr data(nullptr, device_);
  if (auto taken = taken_from_kernel(address(s))) {
    data = std::move(*taken);
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(address(s), c10::kCPU));
  } else if (s.nbytes() > 0 && address(s) != nullptr) {
    data = c10::GetAllocator(on_.type())->allocate(s.nbytes());
    if (!blank_) std::memcpy(kernel_address(data.get()), address(s), s.nbytes());
  }
  c10::Storage d(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(data), c10::GetAllocator(on_.type()), true);
  hosts_.push_back(s);
  given_.emplace(s.unsafeGetStorageImpl(), d);
  return d;
}

void host_side::copy_layout(const at::Tensor& from, const at::Tensor& to) const {
  auto* const i = to.unsafeGetTensorImpl();
  i->set_storage_offset(from.storage_offset());
  i->set_sizes_and_strides(from.sizes(), from.strides());
  to._set_conj(from.is_conj());
  to._set_neg(from.is_neg());
}

at::Tensor host_side::to_host(const at::Tensor& t) {
  if (!of_device(t)) {
    if (t.defined() && t.has_storage()) given_.emplace(t.storage().unsafeGetStorageImpl(), t.storage());  // stays on the host
    return t;
  }
  auto h = at::detail::make_tensor<c10::TensorImpl>(lend(t.storage()), keys(c10::DispatchKey::CPU, t), t.dtype());
  keys_of_views_.emplace(h.storage().unsafeGetStorageImpl(), t.key_set());
  copy_layout(t, h);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) h.unsafeGetTensorImpl()->set_wrapped_number(true);
  return h;
}

c10::IValue host_side::to_host(const c10::IValue& v) {
  if (v.isTensor()) return to_host(v.toTensor());
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(to_host(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional(to_host(*t)) : t);
    return list;
  }
  if (v.isDevice() && v.toDevice().type() == on_.type()) return c10::Device(c10::kCPU);
  if (v.isStorage()) return lend(v.toStorage());
  return v;
}

at::Tensor host_side::to_device(const at::Tensor& t) {
  if (!t.defined() || t.device().type() != c10::kCPU) return t;
  const auto viewed = keys_of_views_.find(t.storage().unsafeGetStorageImpl());
  auto storage = keep(t.storage());
  if (storage.device_type() != on_.type()) return t;
  auto d = viewed != keys_of_views_.end()
               ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), viewed->second, t.dtype())
               : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys(on_.key(), t), t.dtype());
  copy_layout(t, d);
  return d;
}

c10::IValue host_side::to_device(const c10::IValue& v) {
  if (v.isTensor()) return to_device(v.toTensor());
  if (!v.isTensorList()) return v;
  c10::List<at::Tensor> list;
  for (const at::Tensor& t : v.toTensorVector()) list.push_back(to_device(t));
  return list;
}

void host_side::follow(const at::Tensor& of_device, const at::Tensor& of_host) {
  auto* const impl = of_device.unsafeGetTensorImpl();
  const auto known = lent_.find(of_device.storage().unsafeGetStorageImpl());
  const bool same = known != lent_.end() && of_host.storage().unsafeGetStorageImpl() == known->second.host.unsafeGetStorageImpl();
  if (!same) {
    impl->set_storage_keep_dtype(keep(of_host.storage()));
  } else if (auto& mine = known->second; address(mine.host) != mine.data) {  // the kernel resized the storage
    auto taken = taken_from_kernel(address(mine.host));
    TORCH_CHECK(taken || address(mine.host) == nullptr, "emulated: a kernel resized a tensor with memory of somebody else");
    mine.host.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(address(mine.host), c10::kCPU));
    mine.data = address(mine.host);
    mine.device.unsafeGetStorageImpl()->set_data_ptr_noswap(taken ? std::move(*taken) : c10::DataPtr(nullptr, device_));
    mine.device.set_nbytes(mine.host.nbytes());
  }
  if (impl->sizes() == of_host.sizes() && impl->strides() == of_host.strides() &&
      impl->storage_offset() == of_host.storage_offset())
    return;
  impl->set_storage_offset(of_host.storage_offset());
  impl->set_sizes_and_strides(of_host.sizes(), of_host.strides());
}

}  // namespace emulated
