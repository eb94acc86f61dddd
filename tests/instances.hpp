// SPDX-License-Identifier: Apache-2.0
/// @file
/// Captured networks, and budgets of them.
#pragma once

#include <string>

#include <remat/core/evaluate.hpp>
#include <remat/io/json.hpp>

namespace remat::testing {

/// The problem of that name in bench/instances.
inline problem instance(const std::string& name) {
  return read_problem(std::string(REMAT_SOURCE_DIR) + "/bench/instances/" + name + ".json");
}

/// What is held, and this share of what store-all needs above it, bytes.
inline bytes_t share_of_peak(const problem& p, double share) {
  return p.held_bytes() +
         static_cast<bytes_t>(share * static_cast<double>(evaluate(p, store_all_schedule(p)).peak - p.held_bytes()));
}

}  // namespace remat::testing
