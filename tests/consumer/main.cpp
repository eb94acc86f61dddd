// SPDX-License-Identifier: Apache-2.0
// A project that uses the headers: a chain of three operations, store-all, and a budget that is too small.
#include <remat/remat.hpp>

static_assert(REMAT_VERSION_MAJOR > 0 || REMAT_VERSION_MINOR >= 3);

int main() {
  const remat::problem p("chain", {{"x", 8, true}, {"y", 8}, {"z", 8}}, {{"f", {0}, {1}, 1.0}, {"g", {1}, {2}, 2.0}}, {2});
  const auto fits = remat::solve(p, 24, remat::store_all{});
  const auto not_enough = remat::solve(p, 23, remat::store_all{});
  return fits.status == remat::status::optimal && fits.peak == 24 && not_enough.status == remat::status::infeasible ? 0 : 1;
}
