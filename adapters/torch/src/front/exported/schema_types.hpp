// SPDX-License-Identifier: Apache-2.0
/// @file
/// Conversions of literals, slots and lists to the types that a schema declares.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <optional>
#include <utility>

#include "arguments.hpp"

namespace remat::pytorch::exported {

/// The type without `Optional`, and whether it was optional.
std::pair<at::TypePtr, bool> required(at::TypePtr t);

/// A literal of the archive, and its enumeration in PyTorch, if it has one.
struct literal_value {
  at::IValue value;
  at::TypeKind enumeration = at::TypeKind::AnyType;
};

/// The literal as an argument of type `type`; nothing if it cannot be converted.
/// @param type nullptr: any type
std::optional<at::IValue> converted(const literal_value& l, const at::TypePtr& type);

/// How a slot becomes an argument of type `type`; nothing if it cannot.
/// @param type nullptr: any type
std::optional<passing> passed(slot_kind k, const at::TypePtr& type);

/// Element type of a list as kernels take it: symbolic integers, floats and booleans become plain ones.
at::TypePtr list_element(const at::TypePtr& element);

}  // namespace remat::pytorch::exported
