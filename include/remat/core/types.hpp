// SPDX-License-Identifier: Apache-2.0
/// @file
/// The scalar types of the library.
#pragma once

#include <cstdint>
#include <limits>

namespace remat {

/// Sizes in bytes. Signed, so that differences are safe; a problem never holds a number above `max_bytes`.
using bytes_t = std::int64_t;

/// Index of a value or of an operation.
using index_t = std::uint32_t;

/// "No such value / operation".
inline constexpr index_t none = std::numeric_limits<index_t>::max();

/// Largest size a problem accepts: integers up to 2^53 survive a trip through JSON and `double`.
inline constexpr bytes_t max_bytes = bytes_t{1} << 53;

}  // namespace remat
