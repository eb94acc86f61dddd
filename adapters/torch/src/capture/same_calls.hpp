// SPDX-License-Identifier: Apache-2.0
// When calls of operators are the same, but for their tensors' data.
#pragma once

#include "trace.hpp"

namespace remat::pytorch::detail {

/// Equal numbers, texts, lists; of tensors, that both are tensors.
bool same(const c10::IValue& a, const c10::IValue& b);
/// It may be another number in each step.
bool may_differ(const traced_call& c, std::size_t argument);
/// Where a storage from outside begins, bytes.
bytes_t start(const trace& t, index_t storage);
/// A call that gives no tensor, but a number.
bool asks(const traced_call& c);

}  // namespace remat::pytorch::detail
