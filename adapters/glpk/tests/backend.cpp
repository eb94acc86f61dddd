// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>
#include <remat/testing/check_backend.hpp>

#include "../../../tests/backend/checks.hpp"
#include "../../../tests/rounds.hpp"

using namespace remat;

TEST_CASE("glpk: the backend passes the conformance suite") {
  for (const auto& failure : testing::check_backend(glpk::backend{})) FAIL_CHECK(failure);
}

TEST_CASE("glpk: checkmate finds the staged optimum") {
  testing::check_against_oracles(glpk::backend(), 11, testing::shortened(1000));
}
TEST_CASE("glpk: poet agrees with exhaustive search") {
  testing::check_poet_against_oracles(glpk::backend(), 21, testing::shortened(400));
}
TEST_CASE("glpk: checkmate with extra stages agrees with the oracles") {
  testing::check_against_oracles(glpk::backend(), 12, testing::shortened(200), 1);
}
TEST_CASE("glpk: checkmate on unit chains has the time of the closed form") { testing::check_unit_chains(glpk::backend()); }
TEST_CASE("glpk: checkmate with a last stage agrees with the oracles") {
  testing::check_against_oracles(glpk::backend(), 13, testing::shortened(300), 0, true);
}
TEST_CASE("glpk: checkmate is optimal on all small topologies") {
  for (std::size_t n = 1; n <= 6; ++n) testing::check_all_topologies(glpk::backend(), n);
}
TEST_CASE("glpk: checkmate on pyramids and trees") { testing::check_pebbles(glpk::backend()); }
TEST_CASE("glpk: a restricted model of checkmate is never better than the unrestricted one") {
  testing::check_restrictions(glpk::backend(), 14, testing::shortened(400));
}
TEST_CASE("glpk: the published form of checkmate has the same optimum") {
  testing::check_published_form(glpk::backend(), 15, testing::shortened(300));
}
TEST_CASE("glpk: a sweep of checkmate finds every step of the staircase") {
  testing::check_sweep(glpk::backend(), 16, testing::shortened(60));
}
TEST_CASE("glpk: checkmate_rounding returns valid schedules and bounds") {
  testing::check_rounding(glpk::backend(), 17, testing::shortened(300));
}
TEST_CASE("glpk: checkmate and checkmate_rounding conform to the solver suite") {
  testing::check_conformance(glpk::backend(), testing::shortened(60));
}
TEST_CASE("glpk: checkmate at the edges of its interface") { testing::check_edges(glpk::backend()); }
