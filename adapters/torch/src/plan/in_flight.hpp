// SPDX-License-Identifier: Apache-2.0
/// @file
/// Plans for several steps in flight. Private to the adapter.
#pragma once

#include <cstddef>
#include <memory>

#include "search.hpp"

namespace remat::pytorch {

/// Bytes of so many steps in flight by one plan: each holds what its backward needs, one computes.
inline bytes_t bytes_in_flight(const execution_plan& p, std::size_t steps) {
  return static_cast<bytes_t>(steps) * p.held_bytes() + p.needed_bytes() - p.held_bytes();
}

/// The fastest plan in zones that is found by which so many steps in flight take at most `available` bytes. If none is found, one
/// that holds as little as possible, and takes more.
/// @param s     with `all_in_flight`
/// @param steps >= 1
std::shared_ptr<const plan> plan_in_flight(const setup& s, bytes_t available, std::size_t steps, const search_options& o);

}  // namespace remat::pytorch
