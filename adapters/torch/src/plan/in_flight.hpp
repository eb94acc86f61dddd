// SPDX-License-Identifier: Apache-2.0
/// @file
/// Plans for several steps in flight. Private to the adapter.
#pragma once

#include <cstddef>
#include <memory>

#include "search.hpp"

namespace remat::pytorch {

/// Bytes of `steps` steps in flight with one plan: each holds the values for its backward, and one computes.
inline bytes_t bytes_in_flight(const execution_plan& p, std::size_t steps) {
  return static_cast<bytes_t>(steps) * p.held_bytes() + p.needed_bytes() - p.held_bytes();
}

/// The fastest plan in zones with which `steps` steps in flight take at most `available` bytes. If the search finds none:
/// the plan found that holds the least, or else `all_in_flight`. Both exceed `available`.
/// @param s     with `all_in_flight` set
/// @param steps >= 1
std::shared_ptr<const plan> plan_in_flight(const captured_step& s, bytes_t available, std::size_t steps, const search_options& o);

}  // namespace remat::pytorch
