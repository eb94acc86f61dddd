// SPDX-License-Identifier: Apache-2.0
/// @file
/// How often tests of random problems repeat, and how long rows are.
#pragma once

#ifndef REMAT_PART_OF_ROUNDS
#define REMAT_PART_OF_ROUNDS 1
#endif

namespace remat::testing {

/// All rounds, or a whole row; under sanitizers, which make them take minutes, a part: all has run without.
constexpr int shortened(int rounds) { return rounds / REMAT_PART_OF_ROUNDS; }

}  // namespace remat::testing
