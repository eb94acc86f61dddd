// SPDX-License-Identifier: Apache-2.0
/// @file
/// The scalar types of the library.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>

namespace remat {

/// Sizes in bytes. Signed, so that differences are safe; a problem never holds a number above `max_bytes`.
using bytes_t = std::int64_t;

/// A position in a list.
using index_t = std::uint32_t;

/// "No such value / operation / part".
inline constexpr index_t none = std::numeric_limits<index_t>::max();

/// The position of one kind of thing in its list. It converts from and to integers, but not to the position of another kind.
/// (clang 14 takes `std::vector<operation_id>{5}` in a template for five elements: write `std::vector{operation_id(5)}` there.)
/// @tparam Kind  what it is the position of
/// @tparam Index an unsigned integer that is large enough for it
/// @code
/// static_assert(!std::is_convertible_v<remat::value_id, remat::operation_id>);
/// @endcode
template <class Kind, std::unsigned_integral Index = index_t>
class id {
 public:
  constexpr id() = default;
  constexpr id(std::integral auto at) : at_(static_cast<Index>(at)) {}  // NOLINT: literals in problems and tests
  constexpr operator index_t() const { return at_; }
  constexpr id& operator++() { return ++at_, *this; }
  constexpr id operator++(int) { return at_++; }
  constexpr id operator--(int) { return at_--; }

 private:
  Index at_ = 0;
};

/// Positions of different kinds are not compared.
template <class A, class I, class B, class J>
requires(!std::same_as<A, B>) bool operator==(id<A, I>, id<B, J>) = delete;

struct operation;
struct value;
namespace structure {
struct part;
}

using operation_id = id<operation>;   ///< an operation of a problem
using value_id = id<value>;           ///< a value of a problem
using part_id = id<structure::part>;  ///< a part of a partition

/// Largest size a problem accepts, single or in total: integers up to 2^53 survive a trip through JSON and `double`. A budget may
/// be any number of 64 bits.
inline constexpr bytes_t max_bytes = bytes_t{1} << 53;

/// No schedule has a larger peak: all values, and one workspace.
inline constexpr bytes_t max_peak = 2 * max_bytes;

/// The part of a budget that a schedule can use: sizes may be added to it.
constexpr bytes_t usable(bytes_t budget) { return budget < max_peak ? budget : max_peak; }

}  // namespace remat
