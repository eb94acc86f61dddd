// SPDX-License-Identifier: Apache-2.0
// expect: s.name()
// expect: solver
#include <remat/core/solve.hpp>

struct nameless {
  remat::result solve(const remat::problem&, remat::bytes_t, remat::monitor&) const { return {}; }
};
// broken
auto r = remat::solve(remat::problem(), 1, nameless{});
// end
