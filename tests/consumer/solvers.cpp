// SPDX-License-Identifier: Apache-2.0
// A project that links the library of solvers, and creates one by name.
#include <remat/remat.hpp>

int main() {
  const remat::problem p("chain", {{"x", 8, true}, {"y", 8}, {"z", 8}}, {{"f", {0}, {1}, 1.0}, {"g", {1}, {2}, 2.0}}, {2});
  const auto r = remat::solve(p, 24, remat::registry::find("min_cut").make("auto"));
  return r.status == remat::status::optimal && r.peak == 24 && remat::registry::methods().size() > 20 ? 0 : 1;
}
