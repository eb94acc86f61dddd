// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the type that a schema declares makes of a literal, of a slot and of a list.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <optional>
#include <utility>

#include "arguments.hpp"

namespace remat::pytorch::exported {

/// The type without `Optional`, and whether it was there.
std::pair<at::TypePtr, bool> required(at::TypePtr t);

/// A literal of the archive, and which of PyTorch's enumerations it is of, if any.
struct literal_value {
  at::IValue value;
  at::TypeKind enumeration = at::TypeKind::AnyType;
};

/// As an argument of the type of the schema; nothing if it cannot be one.
/// @param type nullptr: any
std::optional<at::IValue> converted(const literal_value& l, const at::TypePtr& type);

/// How a slot becomes an argument of the type; nothing if it cannot.
/// @param type nullptr: any
std::optional<passing> passed(slot_kind k, const at::TypePtr& type);

/// Types of lists as kernels take them: sizes as plain integers, numbers without type where only values count.
at::TypePtr list_element(const at::TypePtr& element);

}  // namespace remat::pytorch::exported
