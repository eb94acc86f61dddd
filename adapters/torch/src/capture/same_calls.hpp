// SPDX-License-Identifier: Apache-2.0
// Compares calls of operators, without the data of their tensors.
#pragma once

#include "trace.hpp"

namespace remat::pytorch::detail {

/// True for equal numbers, texts and lists, and for any two tensors.
bool same(const c10::IValue& a, const c10::IValue& b);
/// True if the argument may be another number in each step.
bool may_differ(const traced_call& c, std::size_t argument);
/// Offset of the slot's tensor in a storage from outside, in bytes; 0 for other storages.
bytes_t slot_offset(const trace& t, index_t storage);
/// True if the call returns numbers and no tensor.
bool returns_numbers(const traced_call& c);

}  // namespace remat::pytorch::detail
