// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makes tensors and argument lists from the views of a program. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// Offset of the first byte of a tensor in its storage.
inline bytes_t byte_offset(const at::Tensor& t) { return t.storage_offset() * static_cast<bytes_t>(t.itemsize()); }

/// A storage over memory that it does not own.
inline c10::Storage storage_over(void* data, std::size_t bytes, c10::Device on) {
  return {c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, on), nullptr, false};
}
/// A storage as a tensor of bytes, which shares its memory.
inline at::Tensor bytes_over(const c10::Storage& s) {
  return at::empty({0}, at::TensorOptions(s.device()).dtype(at::kByte)).set_(s, 0, {static_cast<int64_t>(s.nbytes())}, {1});
}

/// Gives a storage memory of its own, with the same contents. Tensors over it do not notice.
inline void move_to_own_memory(const c10::Storage& s) {
  const auto there = bytes_over(s), own = at::empty_like(there);
  own.copy_(there);
  s.unsafeGetStorageImpl()->swap_data_ptr(*own.storage().unsafeGetStorageImpl());
}

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

inline void set_version(const at::Tensor& t, int64_t version) {
  auto counter = t.unsafeGetTensorImpl()->version_counter();
  counter.set_version(version);
}
/// True if writes to one of the tensors count as writes to the other, as for a view and its base.
inline bool have_one_version_counter(const at::Tensor& a, const at::Tensor& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));  // a pointer to the counter
  const auto of = [](const at::Tensor& t) { return &t.unsafeGetTensorImpl()->version_counter(); };
  return !a.is_inference() && !b.is_inference() && std::memcmp(of(a), of(b), sizeof(c10::VariableVersion)) == 0;
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
  const auto host = bytes_over(s).cpu();
  const auto* data = static_cast<const std::byte*>(host.const_data_ptr());
  return s.nbytes() == 0 ? content() : content(data, data + s.nbytes());
}

/// The bytes as a tensor.
inline at::Tensor byte_tensor(const content& bytes) {
  auto t = at::empty({static_cast<int64_t>(bytes.size())}, at::device(at::kCPU).dtype(at::kByte));
  if (!bytes.empty()) std::memcpy(t.mutable_data_ptr(), bytes.data(), bytes.size());
  return t;
}

/// A constant over this memory, with its flags.
inline at::Tensor constant_over(const c10::Storage& memory, const slot& s) {
  auto t = tensor_of({none, s.type.sizes, s.type.strides, s.offset, s.type.dtype, s.type.conj, s.type.neg}, memory);
  if (s.number) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}
/// A copy of a constant as a tensor.
inline at::Tensor constant_tensor(const program& step, index_t slot) {
  const auto& s = step.slots[slot];
  return constant_over(byte_tensor(step.constants[s.position]).to(s.type.device).storage(), s);
}

/// The device of a step. Numbers may lie on the host nevertheless.
inline c10::Device device_of_step(const program& step) {
  for (const auto& v : step.values)
    if (!v.device.is_cpu()) return v.device;
  return c10::kCPU;
}

/// Replaces each list by a copy, so that writes to its elements do not reach the original.
inline void own_lists(std::vector<c10::IValue>& values) {
  for (auto& v : values)
    if (v.isList()) v = c10::IValue(v.toList().copy());
}
/// The tensor at place `o` in a list of arguments or results.
/// @tparam Place has the members `at` and `element` of `operand`
/// @param first  index of the first argument or result in `values`
template <class Place>
const at::Tensor& tensor_at(const std::vector<c10::IValue>& values, const Place& o, std::size_t first = 0) {
  const auto& v = values[first + static_cast<std::size_t>(o.at)];
  return o.element < 0 ? v.toTensor() : v.toListRef()[static_cast<std::size_t>(o.element)].toTensor();
}
/// Puts a tensor at place `o`. If the place is in a list, the list is modified in place: see `own_lists`.
template <class Place>
void put_tensor(std::vector<c10::IValue>& values, const Place& o, at::Tensor t) {
  auto& v = values[static_cast<std::size_t>(o.at)];
  if (o.element < 0)
    v = std::move(t);
  else
    v.toList().set(static_cast<std::size_t>(o.element), c10::IValue(std::move(t)));
}

/// True if a recomputation of the call leaves this argument out.
inline bool only_first(const call& c, int argument) {
  return std::find(c.first_run_only.begin(), c.first_run_only.end(), argument) != c.first_run_only.end();
}

/// The arguments of a call. Operands with one view are one tensor.
/// @param again  the call is a recomputation
/// @param tensor returns the tensor of a view
template <class F>
std::vector<c10::IValue> stack_of(const call& c, bool again, F&& tensor) {
  auto stack = c.arguments;
  own_lists(stack);
  std::map<index_t, at::Tensor> made;  // by view
  for (const auto& o : c.operands) {
    if (again && only_first(c, o.at)) continue;
    const auto [known, fresh] = made.emplace(o.view, at::Tensor());
    if (fresh) known->second = tensor(o.view);
    put_tensor(stack, o, known->second);
  }
  return stack;
}

}  // namespace remat::pytorch
