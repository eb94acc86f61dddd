// SPDX-License-Identifier: Apache-2.0
/// @file
/// Numbers of rounds in tests of random problems, and lengths of long chains.
#pragma once

#ifndef REMAT_PART_OF_ROUNDS
#define REMAT_PART_OF_ROUNDS 1
#endif

namespace remat::testing {

/// All rounds, or the whole chain. Under sanitizers, where the tests would take minutes, only a part.
constexpr int shortened(int rounds) { return rounds / REMAT_PART_OF_ROUNDS; }

}  // namespace remat::testing
