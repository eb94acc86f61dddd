// SPDX-License-Identifier: Apache-2.0
/// @file
/// Small problems of several kinds in turn, for comparisons with exhaustive search.
#pragma once

#include <random>

#include <remat/core/problem.hpp>
#include <remat/testing/generators.hpp>

namespace remat::testing {

/// A chain with its backward in every fourth round, otherwise a random graph, some of whose operations may run once only.
inline problem chain_or_random(std::mt19937_64& g, int round) {
  if (round % 4 == 0) return random_training_chain(g, 3);
  return random_problem(g, {.operations = 8, .once = round % 4 == 1 ? 25 : 0});
}

}  // namespace remat::testing
