// SPDX-License-Identifier: Apache-2.0
// expect: needs #include <remat/solver/automatic_milp.hpp>
#include <remat/solver/automatic.hpp>

remat::automatic<> without_milp;
struct backend {};
// broken
remat::automatic<backend> method;
// end
