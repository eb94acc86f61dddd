// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory that lies in files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <remat/core/types.hpp>

namespace remat::pytorch {
namespace paged_memory {

/// Says that bytes from `begin` on are those of a file that is mapped: the system takes such pages out of memory when it needs
/// room, and so tensors there count for no budget. Thread-safe, as are the others.
/// @param begin not null
/// @param bytes > 0
/// @return a mark of this mapping, for `remove`
std::uint64_t add(const void* begin, bytes_t bytes);

/// They are so no longer, unless another mapping has taken the place of the one with that mark.
void remove(const void* begin, std::uint64_t mark);

/// Is the byte at `address` in such memory?
/// Complexity: O(log(mappings)); O(1) where there are none.
bool holds(const void* address);
/// Is the storage of `t`?
/// @param t has one
bool holds(const at::Tensor& t);

}  // namespace paged_memory

/// Bytes of the storages of these tensors, but for those that lie in files; a storage that several share counts once. What is
/// undefined or has no storage takes none. On a device it is what its allocator takes for them.
bytes_t unpaged_bytes(const std::vector<at::Tensor>& tensors);

}  // namespace remat::pytorch
