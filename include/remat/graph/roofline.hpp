// SPDX-License-Identifier: Apache-2.0
/// @file
/// Times from a roofline, for devices that are not available for measurements.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <remat/core/error.hpp>
#include <remat/graph/table.hpp>

namespace remat {

/// A device, described by its peak rates.
///
/// Reference: Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model", CACM 52(4), 2009.
struct roofline {
  double flops_per_second;  ///< peak arithmetic, flop/s, > 0
  double bytes_per_second;  ///< peak memory bandwidth, bytes/s, > 0
  double overhead = 0;      ///< s per operation (launch, dispatch), >= 0

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    auto demand = [](bool good, const char* member) {
      if (!good) throw bad_option(std::string("roofline.") + member + " is out of range");
    };
    demand(std::isfinite(flops_per_second) && flops_per_second > 0, "flops_per_second");
    demand(std::isfinite(bytes_per_second) && bytes_per_second > 0, "bytes_per_second");
    demand(std::isfinite(overhead) && overhead >= 0, "overhead");
  }

  /// Time of an operation: overhead + max(flops / peak, moved / bandwidth).
  /// Complexity: O(1).
  /// @param flops arithmetic operations, >= 0
  /// @param moved bytes read and written, >= 0
  /// @return s
  double seconds(double flops, double moved) const {
    return overhead + std::max(flops / flops_per_second, moved / bytes_per_second);
  }
};

/// A column of seconds for a `table`, computed from a column of flops and a column of bytes moved per operation.
/// @code
/// constexpr remat::roofline gpu{.flops_per_second = 300e12, .bytes_per_second = 2e12, .overhead = 5e-6};
/// remat::table cost{remat::roofline_of(gpu, flops, moved), remat::bytes_of(sizes)};
/// @endcode
template <class Flops, class Moved>
struct roofline_of {
  roofline device;
  Flops flops;
  Moved moved;
  /// @throws bad_option if a member of the device is out of range
  roofline_of(roofline d, Flops f, Moved m) : device(d), flops(std::move(f)), moved(std::move(m)) { device.validate(); }
  template <class V>
  double seconds(const V& v) const {
    return device.seconds(static_cast<double>(detail::look_up(flops, v, "flops")),
                          static_cast<double>(detail::look_up(moved, v, "bytes moved")));
  }
};

}  // namespace remat
