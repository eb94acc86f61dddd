// SPDX-License-Identifier: Apache-2.0
#include <remat/core/solve.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/rockmate.hpp>

#ifdef REMAT_WITH_HIGHS
#include <remat/highs/backend.hpp>
#endif
#ifdef REMAT_WITH_GLPK
#include <remat/glpk/backend.hpp>
#endif

#include "solver.hpp"

namespace remat::torch {
namespace {

template <class Backend>
result by_blocks(const problem& p, bytes_t budget, const limits& l) {
  using inner = checkmate<Backend>;
  return solve(p, budget, rockmate<inner>(inner(inner::options::fast())), l);
}

}  // namespace

result solve_by_default(const problem& p, bytes_t budget, const limits& l) {
#ifdef REMAT_WITH_HIGHS
  if (highs::backend::available()) return by_blocks<highs::backend>(p, budget, l);
#endif
#ifdef REMAT_WITH_GLPK
  return by_blocks<glpk::backend>(p, budget, l);
#else
  return solve(p, budget, rockmate<>(), l);
#endif
}

}  // namespace remat::torch
