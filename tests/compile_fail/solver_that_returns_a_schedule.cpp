// SPDX-License-Identifier: Apache-2.0
// expect: s.solve(p, budget, m)
// expect: same_as<result>
#include <remat/core/solve.hpp>

struct hasty {
  const char* name() const { return "hasty"; }
  remat::schedule solve(const remat::problem&, remat::bytes_t, remat::monitor&) const { return {}; }
};
// broken
auto r = remat::solve(remat::problem(), 1, hasty{});
// end
