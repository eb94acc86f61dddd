// SPDX-License-Identifier: Apache-2.0
/// @file
/// Captured networks, and budgets.
#pragma once

#include <string>

#include <remat/core/solve.hpp>

namespace remat::testing {

/// The problem of that name in bench/instances; compiled once, as reading it takes the compiler longer than most tests.
problem instance(const std::string& name);

/// What is held, and this share of what store-all needs above it, bytes.
inline bytes_t share_of_peak(const problem& p, double share) {
  return p.held_bytes() +
         static_cast<bytes_t>(share * static_cast<double>(evaluate(p, store_all_schedule(p)).peak - p.held_bytes()));
}

/// The solver's schedule with the least memory among budgets of a byte, two bytes, ...
template <class S>
result leanest(const problem& p, const S& s) {
  for (bytes_t budget = 1;; ++budget)
    if (auto r = solve(p, budget, s); r.found()) return r;
}

}  // namespace remat::testing
