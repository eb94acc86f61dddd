// SPDX-License-Identifier: Apache-2.0
// Plans a problem in the exchange format: plan_file PROBLEM BUDGET, such as bench/instances/resnet18.json 60%.
#include <iostream>

#include <remat/core/solve.hpp>
#include <remat/highs/backend.hpp>
#include <remat/io/bytes.hpp>
#include <remat/io/json.hpp>
#include <remat/solver/automatic_milp.hpp>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto p = remat::read_problem(argv[1]);
  const remat::automatic<remat::highs::backend> method;
  const auto r = remat::solve(p, remat::parse_budget(argv[2], p), method, {.seconds = 20, .gap = 0.005});
  if (!r.found()) return 1;
  std::cout << remat::format_seconds(r.seconds) << " in " << remat::format_bytes(r.peak) << ", " << r.recomputed
            << " recomputations, at most " << 100 * r.gap() << " % slower than the best possible\n";
}
