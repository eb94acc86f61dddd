// SPDX-License-Identifier: Apache-2.0
/// @file
/// Small problems of several kinds, for comparisons with exhaustive search.
#pragma once

#include <random>

#include <remat/core/problem.hpp>
#include <remat/testing/generators.hpp>

namespace remat::testing {

/// In every fourth round a chain with its backward, otherwise a random graph, in which some operations may be once-only.
inline problem chain_or_random(std::mt19937_64& g, int round) {
  if (round % 4 == 0) return random_training_chain(g, 3);
  return random_problem(g, {.operations = 8, .once = round % 4 == 1 ? 25 : 0});
}

}  // namespace remat::testing
