// SPDX-License-Identifier: Apache-2.0
#include "solver.hpp"

#include <remat/core/solve.hpp>
#include <remat/registry/registry.hpp>

namespace remat::pytorch {

result solve_by_default(const problem& p, bytes_t budget, const limits& l, const std::function<control(const progress&)>& watch) {
  return solve(p, budget, registry::find("automatic").make("auto"), l, watch);
}

}  // namespace remat::pytorch
