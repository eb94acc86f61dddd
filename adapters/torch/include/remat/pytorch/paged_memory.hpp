// SPDX-License-Identifier: Apache-2.0
/// @file
/// Registry of memory-mapped files: memory that counts for no budget.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <remat/core/types.hpp>

namespace remat::pytorch {
namespace paged_memory {

/// Registers a memory-mapped file. The operating system evicts its pages when memory runs short, so tensors there count for no
/// budget. All functions of this namespace are thread-safe.
/// @param begin first byte, not null
/// @param bytes size of the mapping, > 0
/// @return mark of this mapping, for `remove`
/// Complexity: O(log(mappings)).
std::uint64_t add(const void* begin, bytes_t bytes);

/// Removes a mapping, unless a later mapping with another mark begins at the same address.
void remove(const void* begin, std::uint64_t mark);

/// True if the byte at `address` is in a registered mapping.
/// Complexity: O(log(mappings)); O(1) if there are none.
bool holds(const void* address);
/// True if the storage of `t` is in a registered mapping.
/// @param t a tensor with a storage
bool holds(const at::Tensor& t);

}  // namespace paged_memory

/// Bytes of the storages of these tensors, as the allocators of their devices count them. Storages in memory-mapped files are
/// left out, and a shared storage counts once. Undefined tensors and tensors without storage count nothing.
bytes_t unpaged_bytes(const std::vector<at::Tensor>& tensors);

}  // namespace remat::pytorch
