// SPDX-License-Identifier: Apache-2.0
// expect: s.sweep(p, budgets, m)
#include <remat/core/pareto_curve.hpp>

struct single {
  const char* name() const { return "single"; }
  remat::result solve(const remat::problem&, remat::bytes_t, remat::monitor&) const { return {}; }
  remat::result sweep(const remat::problem&, std::span<const remat::bytes_t>, remat::monitor&) const { return {}; }
};
static_assert(remat::solver<single>);
// broken
static_assert(remat::sweeping_solver<single>);
// end
