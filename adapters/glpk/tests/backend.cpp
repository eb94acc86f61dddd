// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>
#include <remat/testing/check_backend.hpp>

#include "../../../tests/milp/check_checkmate.hpp"

using namespace remat;

TEST_CASE("glpk: conforms to the backend suite") {
  for (const auto& failure : testing::check_backend(glpk::backend{})) FAIL_CHECK(failure);
}

TEST_CASE("glpk: checkmate equals the staged optimum") { testing::check_against_oracles<glpk::backend>(11, 2000); }
TEST_CASE("glpk: checkmate with extra stages") { testing::check_against_oracles<glpk::backend>(12, 200, 1); }
TEST_CASE("glpk: checkmate on unit chains") { testing::check_unit_chains<glpk::backend>(); }
TEST_CASE("glpk: checkmate at the edges") { testing::check_edges<glpk::backend>(); }
