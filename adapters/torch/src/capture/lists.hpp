// SPDX-License-Identifier: Apache-2.0
/// @file
/// Visits the tensors in arguments and results. Private to the adapter.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>

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

}  // namespace remat::pytorch::detail
