// SPDX-License-Identifier: Apache-2.0
// expect: s.solve(p, budget, m)
// expect: solver
#include <remat/core/pareto_curve.hpp>

struct deaf {
  const char* name() const { return "deaf"; }
  remat::result solve(const remat::problem&, remat::bytes_t) const { return {}; }
};
// broken
auto curve = remat::pareto_curve(remat::problem(), {1, 2}, deaf{});
// end
