// SPDX-License-Identifier: Apache-2.0
#include <remat/core/solve.hpp>
#include <remat/solver/automatic.hpp>

#ifdef REMAT_WITH_HIGHS
#include <remat/highs/backend.hpp>
#endif
#ifdef REMAT_WITH_GLPK
#include <remat/glpk/backend.hpp>
#endif

#include "solver.hpp"

namespace remat::torch {

result solve_by_default(const problem& p, bytes_t budget, const limits& l) {
#ifdef REMAT_WITH_HIGHS
  if (highs::backend::available()) return solve(p, budget, automatic<highs::backend>(), l);
#endif
#ifdef REMAT_WITH_GLPK
  return solve(p, budget, automatic<glpk::backend>(), l);
#else
  return solve(p, budget, automatic<>(), l);
#endif
}

}  // namespace remat::torch
