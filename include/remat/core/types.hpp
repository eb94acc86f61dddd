// SPDX-License-Identifier: Apache-2.0
/// @file
/// The scalar types of the library.
#pragma once

#include <compare>
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

/// The position of an element of type `Kind` in its list. It converts from and to integers, but not to positions of other kinds.
/// (In a template, clang 14 reads `std::vector<operation_id>{5}` as five elements: write `std::vector{operation_id(5)}`.)
/// @tparam Kind  type of the element; may be incomplete
/// @tparam Index unsigned integer type that stores the position
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

/// Positions of different kinds cannot be compared.
template <class A, class I, class B, class J>
requires(!std::same_as<A, B>) bool operator==(id<A, I>, id<B, J>) = delete;
template <class A, class I, class B, class J>
requires(!std::same_as<A, B>) std::strong_ordering operator<=>(id<A, I>, id<B, J>) = delete;

struct operation;
struct value;
namespace structure {
struct part;
}

using operation_id = id<operation>;   ///< an operation of a problem
using value_id = id<value>;           ///< a value of a problem
using part_id = id<structure::part>;  ///< a part of a partition

/// Largest size that a problem accepts, in bytes: for all values together, and for each workspace. JSON and `double` hold
/// integers up to 2^53 exactly. A budget may be any 64-bit number.
inline constexpr bytes_t max_bytes = bytes_t{1} << 53;

/// Largest peak of a schedule that computes no value while it is on the device, bytes: all values, and one workspace.
inline constexpr bytes_t max_peak = 2 * max_bytes;

/// The budget, at most `max_peak`, bytes. Adding sizes to the result does not overflow.
constexpr bytes_t clamp_budget(bytes_t budget) { return budget < max_peak ? budget : max_peak; }

}  // namespace remat
