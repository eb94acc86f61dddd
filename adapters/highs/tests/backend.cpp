// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/highs/backend.hpp>
#include <remat/testing/check_backend.hpp>

#include "../../../tests/backend/checks.hpp"
#include "../../../tests/rounds.hpp"

using namespace remat;

TEST_CASE("highs: the backend passes the conformance suite") {
  for (const auto& failure : testing::check_backend(highs::backend{})) FAIL_CHECK(failure);
}

TEST_CASE("highs: checkmate finds the staged optimum") {
  testing::check_against_oracles(highs::backend(), 11, testing::shortened(600));
}
TEST_CASE("highs: poet agrees with exhaustive search") {
  testing::check_poet_against_oracles(highs::backend(), 21, testing::shortened(600));
}
TEST_CASE("highs: checkmate with extra stages agrees with the oracles") {
  testing::check_against_oracles(highs::backend(), 12, testing::shortened(100), 1);
}
TEST_CASE("highs: checkmate on unit chains has the time of the closed form") { testing::check_unit_chains(highs::backend()); }
TEST_CASE("highs: checkmate with a last stage agrees with the oracles") {
  testing::check_against_oracles(highs::backend(), 13, testing::shortened(100), 0, true);
}
TEST_CASE("highs: checkmate is optimal on all small topologies") {
  for (std::size_t n = 1; n <= 5; ++n) testing::check_all_topologies(highs::backend(), n);
}
TEST_CASE("highs: checkmate on pyramids and trees") { testing::check_pebbles(highs::backend()); }
TEST_CASE("highs: a restricted model of checkmate is never better than the unrestricted one") {
  testing::check_restrictions(highs::backend(), 14, 50);
}
TEST_CASE("highs: the published form of checkmate has the same optimum") {
  testing::check_published_form(highs::backend(), 15, testing::shortened(60));
}
TEST_CASE("highs: a sweep of checkmate finds every step of the staircase") {
  testing::check_sweep(highs::backend(), 16, testing::shortened(20));
}
TEST_CASE("highs: checkmate_rounding returns valid schedules and bounds") {
  testing::check_rounding(highs::backend(), 17, testing::shortened(60));
}
TEST_CASE("highs: checkmate and checkmate_rounding conform to the solver suite") {
  testing::check_conformance(highs::backend(), testing::shortened(15));
}
TEST_CASE("highs: checkmate at the edges of its interface") { testing::check_edges(highs::backend()); }

TEST_CASE("highs: the error for a missing library names it and says what to install") {
  CHECK(highs::backend::available());
  const highs::backend::options missing{.library = "/nonexistent/libhighs.so"};
  CHECK_FALSE(highs::backend::available(missing));
  CHECK_THROWS_AS(highs::backend(missing), not_available);
  CHECK_THROWS_WITH(highs::backend(missing),
                    Catch::Contains("pip install highspy") && Catch::Contains("/nonexistent/libhighs.so"));
  CHECK_THROWS_WITH(highs::backend({.library = "libm.so.6"}), Catch::Contains("has no function Highs_create"));
}
