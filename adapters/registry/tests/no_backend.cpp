// SPDX-License-Identifier: Apache-2.0
// The program's solvers in a build without any MILP library: what needs one says what to install, the rest works.
#undef REMAT_WITH_HIGHS
#undef REMAT_WITH_GLPK
#include <catch2/catch.hpp>

#include <random>

#include <remat/core/solve.hpp>
#include <remat/registry/registry.hpp>
#include <remat/testing/generators.hpp>

#include "../src/backend.cpp"

TEST_CASE("without a MILP library") {
  std::mt19937_64 g(1);
  const auto p = remat::testing::random_training_chain(g, 6);
  const auto ask = [&](const char* solver, const char* backend) {
    return remat::solve(p, remat::evaluate(p, remat::store_all_schedule(p)).peak - 1, remat::registry::find(solver).make(backend),
                        {.seconds = 10});
  };
  CHECK(remat::registry::without_milp("auto"));
  for (const auto& b : remat::registry::backends()) CHECK_FALSE(b.available);
  for (const char* solver : {"checkmate", "checkmate-fast"})
    for (const char* backend : {"auto", "highs", "glpk"}) {
      CHECK_THROWS_AS(ask(solver, backend), remat::not_available);
      CHECK_THROWS_WITH(ask(solver, backend), Catch::Contains("pip install highspy") && Catch::Contains("libglpk-dev"));
    }
  CHECK_THROWS_AS(ask("rockmate", "glpk"), remat::not_available);  // asked for by name: never replaced silently
  CHECK(ask("rockmate", "auto").found());
  CHECK(ask("min_cut", "auto").found());
}
