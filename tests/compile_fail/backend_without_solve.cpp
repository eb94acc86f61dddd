// SPDX-License-Identifier: Apache-2.0
// expect: b.solve(m, o)
// expect: backend
#include <remat/solver/checkmate.hpp>

struct silent {
  const char* name() const { return "silent"; }
};
// broken
remat::checkmate<silent> method;
// end
