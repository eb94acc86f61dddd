// SPDX-License-Identifier: Apache-2.0
/// @file
/// What `evaluate` says of a schedule.
#pragma once

#include <cstddef>
#include <vector>

#include <remat/core/types.hpp>

namespace remat {

/// What a schedule costs.
struct evaluation {
  /// A copy from one tier to another.
  struct copy {
    std::size_t step;   ///< that asks for it
    double begin, end;  ///< s
  };
  bytes_t peak = 0;             ///< largest memory of the device over all steps, held sources included
  std::vector<bytes_t> peaks;   ///< largest memory of each tier
  double seconds = 0;           ///< makespan over all streams; of a cyclic schedule, the period
  std::size_t computed = 0;     ///< compute steps
  std::size_t recomputed = 0;   ///< compute steps of an operation that had run before
  std::vector<bytes_t> memory;  ///< bytes on the device while step i runs (after it, for a drop)
  std::vector<copy> copies;     ///< in the order in which they are asked for
  std::vector<double> ends;     ///< time at which step i ends, for a copy or a drop elsewhere at which it is asked for, s
};

}  // namespace remat
