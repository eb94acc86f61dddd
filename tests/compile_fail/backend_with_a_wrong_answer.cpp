// SPDX-License-Identifier: Apache-2.0
// expect: b.solve(m, o)
// expect: same_as<solution>
#include <remat/milp/backend.hpp>

struct vague {
  const char* name() const { return "vague"; }
  Eigen::VectorXd solve(const remat::milp::model&, const remat::milp::options&) const { return {}; }
};
// broken
auto s = remat::milp::solve(vague{}, remat::milp::model{});
// end
