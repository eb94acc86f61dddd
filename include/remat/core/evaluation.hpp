// SPDX-License-Identifier: Apache-2.0
/// @file
/// The result of `evaluate`.
#pragma once

#include <cstddef>
#include <vector>

#include <remat/core/types.hpp>

namespace remat {

/// Memory, time and counts of a schedule.
struct evaluation {
  /// A copy from one tier to another.
  struct copy {
    std::size_t step;   ///< index of the step that issues the copy
    double begin, end;  ///< s
  };
  bytes_t peak = 0;             ///< largest memory of the device over all steps, held sources included, bytes
  std::vector<bytes_t> peaks;   ///< largest memory of each tier, bytes
  double seconds = 0;           ///< makespan over all streams, s; of a cyclic schedule, the period
  std::size_t computed = 0;     ///< compute steps
  std::size_t recomputed = 0;   ///< compute steps of an operation that had run before
  std::vector<bytes_t> memory;  ///< bytes on the device while step i runs (after the step, for a drop)
  std::vector<copy> copies;     ///< in the order in which the steps issue them
  std::vector<double> ends;     ///< time at which step i ends, or is issued (a copy, or a drop on another tier), s
};

}  // namespace remat
