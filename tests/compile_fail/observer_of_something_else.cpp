// SPDX-License-Identifier: Apache-2.0
// expect: observer
#include <remat/testing/archetypes.hpp>

// broken
auto r = remat::solve(remat::problem(), 1, remat::testing::solver_archetype{}, {}, [](int) {});
// end
