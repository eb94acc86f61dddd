// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makes tensors and argument lists from the views of a program. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// The tensor that view `v` describes in storage `s`, moved by `shift` bytes.
/// @throws c10::Error if there is no element at that byte, or the storage is too small
inline at::Tensor tensor_of(const byte_view& v, const c10::Storage& s, int64_t shift = 0) {
  const auto element = static_cast<int64_t>(c10::elementSize(v.dtype));
  const auto first = v.offset + shift;
  TORCH_CHECK(first >= 0 && first % element == 0, "remat: the module views a tensor as ", v.dtype,
              ", which takes a first byte that is a multiple of ", element, "; this one begins at byte ", first,
              " of its storage");
  const auto offset = first / element;
  const auto bytes =
      at::detail::computeStorageNbytes(v.sizes, v.strides, static_cast<std::size_t>(element), static_cast<std::size_t>(offset));
  TORCH_CHECK(bytes <= s.nbytes(), "remat: a storage has ", s.nbytes(), " bytes, the module reads ", bytes);
  auto t = at::empty({0}, at::TensorOptions().dtype(v.dtype).device(s.device())).set_(s, offset, v.sizes, v.strides);
  if (v.conj) t = at::_conj(t);
  if (v.neg) t = at::_neg_view(t);
  return t;
}

/// True if the tensor stands for several gradients (`is_grads_batched`, `torch.func.vmap`).
inline bool is_batched(const at::Tensor& t) {
  return t.defined() && t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
}

/// True if both strides lead to the same elements. Strides of dimensions of size 1 do not count.
inline bool same_strides(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1 && a[d] != b[d]) return false;
  return true;
}
/// True if no two elements share a place, except along expanded dimensions (stride 0).
inline bool apart_or_expanded(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && strides[d] != 0) dimensions.emplace_back(strides[d], sizes[d]);
  std::sort(dimensions.begin(), dimensions.end());
  int64_t room = 1;
  for (const auto& [stride, size] : dimensions) {
    if (stride < room) return false;
    room = stride * size;
  }
  return true;
}
/// The first element of each dimension that `strides` expand. Writing these elements writes all.
inline at::Tensor first_of_expanded(at::Tensor t, at::IntArrayRef strides) {
  for (std::size_t d = 0; d < strides.size(); ++d)
    if (strides[d] == 0 && t.size(static_cast<int64_t>(d)) > 1) t = t.narrow(static_cast<int64_t>(d), 0, 1);
  return t;
}
inline bool is_expanded(at::IntArrayRef sizes, at::IntArrayRef strides) {
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (strides[d] == 0 && sizes[d] > 1) return true;
  return false;
}

/// True if the view is a tensor without dimensions that the program owns, such as a wrapped number.
inline bool is_number(const program& step, index_t view) {
  const auto& v = step.views[view];
  return v.whole && v.sizes.empty() && step.from(v.value) == role::constant;
}

/// A copy of the bytes of a storage.
inline content content_of(const c10::Storage& s) {
  const auto bytes = static_cast<int64_t>(s.nbytes());
  const auto host = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(s.device())).set_(s, 0, {bytes}, {1}).cpu();
  const auto* data = static_cast<const std::byte*>(host.const_data_ptr());
  return bytes == 0 ? content() : content(data, data + bytes);
}

/// The bytes as a tensor.
inline at::Tensor byte_tensor(const content& bytes) {
  auto t = at::empty({static_cast<int64_t>(bytes.size())}, at::device(at::kCPU).dtype(at::kByte));
  if (!bytes.empty()) std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
  return t;
}

/// A copy of a constant as a tensor, with its flags.
inline at::Tensor constant_tensor(const program& step, index_t slot) {
  const auto& s = step.slots[slot];
  const auto copy = byte_tensor(step.constants[s.position]).to(s.type.device);
  auto t = tensor_of({none, s.type.sizes, s.type.strides, s.offset, s.type.dtype, s.type.conj, s.type.neg}, copy.storage());
  if (s.number) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}

/// The device of a step. Numbers may lie on the host nevertheless.
inline c10::Device device_of_step(const program& step) {
  for (const auto& v : step.values)
    if (!v.device.is_cpu()) return v.device;
  return c10::kCPU;
}

/// The arguments of a call.
/// @param again  the call is a recomputation
/// @param tensor returns the tensor of a view
template <class F>
std::vector<c10::IValue> stack_of(const call& c, bool again, F&& tensor) {
  auto stack = c.arguments;
  for (auto& argument : stack)
    if (argument.isList()) argument = c10::IValue(argument.toList().copy());
  for (const auto& o : c.operands) {
    if (again && std::find(c.first_run_only.begin(), c.first_run_only.end(), o.at) != c.first_run_only.end()) continue;
    auto& argument = stack[static_cast<std::size_t>(o.at)];
    if (o.element < 0)
      argument = tensor(o.view);
    else
      argument.toList().set(static_cast<std::size_t>(o.element), c10::IValue(tensor(o.view)));
  }
  return stack;
}

/// The tensor that a call left on the stack as result `r`.
inline at::Tensor result_of(const std::vector<c10::IValue>& stack, const operand& r) {
  const auto& v = stack[static_cast<std::size_t>(r.at)];
  return r.element < 0 ? v.toTensor() : v.toListRef()[static_cast<std::size_t>(r.element)].toTensor();
}

}  // namespace remat::pytorch
