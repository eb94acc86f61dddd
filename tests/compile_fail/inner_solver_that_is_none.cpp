// SPDX-License-Identifier: Apache-2.0
// expect: solver
// expect: s.name()
#include <remat/solver/rockmate.hpp>

// broken
remat::rockmate<int> method;
// end
