// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>
#include <remat/testing/check_backend.hpp>

#include "../../../tests/backend/checks.hpp"

using namespace remat;

TEST_CASE("glpk: conforms to the backend suite") {
  for (const auto& failure : testing::check_backend(glpk::backend{})) FAIL_CHECK(failure);
}

TEST_CASE("glpk: checkmate equals the staged optimum") { testing::check_against_oracles(glpk::backend(), 11, 1000); }
TEST_CASE("glpk: poet against exhaustive search") { testing::check_poet_against_oracles(glpk::backend(), 21, 400); }
TEST_CASE("glpk: checkmate with extra stages") { testing::check_against_oracles(glpk::backend(), 12, 200, 1); }
TEST_CASE("glpk: checkmate on unit chains") { testing::check_unit_chains(glpk::backend()); }
TEST_CASE("glpk: checkmate with a last stage") { testing::check_against_oracles(glpk::backend(), 13, 300, 0, true); }
TEST_CASE("glpk: checkmate on all topologies") {
  for (std::size_t n = 1; n <= 6; ++n) testing::check_all_topologies(glpk::backend(), n);
}
TEST_CASE("glpk: checkmate on pyramids and trees") { testing::check_pebbles(glpk::backend()); }
TEST_CASE("glpk: restrictions against the unrestricted model") { testing::check_restrictions(glpk::backend(), 14, 400); }
TEST_CASE("glpk: the published form has the same optimum") { testing::check_published_form(glpk::backend(), 15, 300); }
TEST_CASE("glpk: sweep and staircase") { testing::check_sweep(glpk::backend(), 16, 60); }
TEST_CASE("glpk: rounding") { testing::check_rounding(glpk::backend(), 17, 300); }
TEST_CASE("glpk: solvers conform") { testing::check_conformance(glpk::backend(), 60); }
TEST_CASE("glpk: checkmate at the edges") { testing::check_edges(glpk::backend()); }
