// SPDX-License-Identifier: Apache-2.0
/// @file
/// Captured networks, and budgets for them.
#pragma once

#include <string>

#include <remat/core/solve.hpp>

namespace remat::testing {

/// The problem of the given name in bench/instances. Compiled once, because compiling the reader takes longer than most tests.
problem instance(const std::string& name);

/// The held bytes, plus the given share of the bytes that store-all needs above them.
inline bytes_t share_of_peak(const problem& p, double share) {
  return p.held_bytes() +
         static_cast<bytes_t>(share * static_cast<double>(evaluate(p, store_all_schedule(p)).peak - p.held_bytes()));
}

/// The solver's schedule at the smallest budget that it solves, trying 1 byte, 2 bytes, ...
template <class S>
result leanest(const problem& p, const S& s) {
  for (bytes_t budget = 1;; ++budget)
    if (auto r = solve(p, budget, s); r.found()) return r;
}

}  // namespace remat::testing
