// SPDX-License-Identifier: Apache-2.0
#include "solver.hpp"

#include <remat/core/solve.hpp>
#include <remat/registry/registry.hpp>

namespace remat::torch {

result solve_by_default(const problem& p, bytes_t budget, const limits& l) {
  return solve(p, budget, registry::find("automatic").make("auto"), l);
}

}  // namespace remat::torch
