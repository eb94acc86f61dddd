// SPDX-License-Identifier: Apache-2.0
// expect: curve_observer
#include <remat/core/pareto_curve.hpp>
#include <remat/testing/archetypes.hpp>

// broken
auto curve = remat::pareto_curve(remat::problem(), {1, 2}, remat::testing::solver_archetype{}, {}, [](int) {});
// end
