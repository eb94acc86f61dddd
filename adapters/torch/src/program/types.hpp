// SPDX-License-Identifier: Apache-2.0
/// @file
/// Types of arguments. Private to the adapter.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace remat::pytorch {

/// True if the argument has the type of a schema. Accepts the undefined tensors of a program, for which `IValue::type` fails.
bool fits(const c10::IValue& v, const c10::Type& type);

}  // namespace remat::pytorch
