// SPDX-License-Identifier: Apache-2.0
/// @file
/// Visits the tensors in arguments and results, and takes arguments and results from a stack. Private to the adapter.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <vector>

namespace remat::pytorch::detail {

/// Calls `f(tensor, element)` for each defined tensor of an argument or result.
template <class F>
void each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor(), -1);
  } else if (v.isList()) {
    const auto list = v.toListRef();
    for (std::size_t i = 0; i < list.size(); ++i)
      if (list[i].isTensor() && list[i].toTensor().defined()) f(list[i].toTensor(), static_cast<int>(i));
  }
}

/// Calls `f(tensor, element)` for each defined tensor of several arguments or results.
template <class F>
void each_tensor(const std::vector<c10::IValue>& list, F f) {
  for (const auto& v : list) each_tensor(v, f);
}

/// Copies the values of a stack from index `first` on.
inline std::vector<c10::IValue> values_from(const ::torch::jit::Stack& stack, std::size_t first) {
  return at::ArrayRef<c10::IValue>(stack).slice(first).vec();
}
/// Replaces the values of a stack from index `first` on.
inline void replace_from(::torch::jit::Stack& stack, std::size_t first, const std::vector<c10::IValue>& by) {
  stack.resize(first);
  stack.insert(stack.end(), by.begin(), by.end());
}

}  // namespace remat::pytorch::detail
