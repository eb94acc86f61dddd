// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tensors and argument lists from the views of a program. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <vector>

#include <remat/torch/program.hpp>

namespace remat::torch {

/// A tensor of storage `s` as view `v` has it, `shift` bytes further on.
/// @throws c10::Error if there is no element at that byte, or the storage is too small
inline at::Tensor tensor_of(const tensor_view& v, const c10::Storage& s, int64_t shift = 0) {
  const auto element = static_cast<int64_t>(c10::elementSize(v.dtype));
  TORCH_CHECK(shift % element == 0, "remat: the module views an input as ", v.dtype,
              ", which takes a first byte that is a multiple of ", element, "; this one begins at byte ", shift,
              " of its storage");
  const auto offset = v.offset + shift / element;
  const auto bytes =
      at::detail::computeStorageNbytes(v.sizes, v.strides, static_cast<std::size_t>(element), static_cast<std::size_t>(offset));
  TORCH_CHECK(bytes <= s.nbytes(), "remat: a storage has ", s.nbytes(), " bytes, the module reads ", bytes);
  auto t = at::empty({0}, at::TensorOptions().dtype(v.dtype).device(s.device())).set_(s, offset, v.sizes, v.strides);
  if (v.conj) t = at::_conj(t);
  if (v.neg) t = at::_neg_view(t);
  return t;
}

/// The view is a tensor of no dimensions that the program owns, such as a wrapped number.
inline bool is_number(const program& step, index_t view) {
  const auto& v = step.views[view];
  const auto& value = step.values[v.value];
  return v.whole && v.sizes.empty() && value.from == role::constant && value.tensor.defined();
}

/// Arguments of a call.
/// @param again  it is a recomputation
/// @param tensor gives the tensor for a view
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

}  // namespace remat::torch
