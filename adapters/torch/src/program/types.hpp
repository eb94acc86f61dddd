// SPDX-License-Identifier: Apache-2.0
/// @file
/// Types of arguments. Private to the adapter.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace remat::pytorch {

/// The argument is of the type in a schema. Tensors of a program are undefined, which `IValue::type` does not bear.
bool fits(const c10::IValue& v, const c10::Type& type);

}  // namespace remat::pytorch
