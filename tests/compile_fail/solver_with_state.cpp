// SPDX-License-Identifier: Apache-2.0
// expect: s.solve(p, budget, m)
#include <remat/core/solve.hpp>

struct stateful {
  int runs = 0;
  const char* name() const { return "stateful"; }
  remat::result solve(const remat::problem&, remat::bytes_t, remat::monitor&) {
    ++runs;
    return {};
  }
};
// broken
static_assert(remat::solver<stateful>);
// end
