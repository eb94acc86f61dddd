// SPDX-License-Identifier: Apache-2.0
// expect: b.solve(m, o)
#include <remat/milp/backend.hpp>

struct stateful {
  int runs = 0;
  const char* name() const { return "stateful"; }
  remat::milp::solution solve(const remat::milp::model&, const remat::milp::options&) {
    ++runs;
    return {};
  }
};
// broken
static_assert(remat::milp::backend<stateful>);
// end
