// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/highs/backend.hpp>
#include <remat/testing/check_backend.hpp>

#include "../../../tests/backend/checks.hpp"

using namespace remat;

TEST_CASE("highs: conforms to the backend suite") {
  for (const auto& failure : testing::check_backend(highs::backend{})) FAIL_CHECK(failure);
}

TEST_CASE("highs: checkmate equals the staged optimum") { testing::check_against_oracles(highs::backend(), 11, 600); }
TEST_CASE("highs: poet against exhaustive search") { testing::check_poet_against_oracles(highs::backend(), 21, 600); }
TEST_CASE("highs: checkmate with extra stages") { testing::check_against_oracles(highs::backend(), 12, 100, 1); }
TEST_CASE("highs: checkmate on unit chains") { testing::check_unit_chains(highs::backend()); }
TEST_CASE("highs: checkmate with a last stage") { testing::check_against_oracles(highs::backend(), 13, 100, 0, true); }
TEST_CASE("highs: checkmate on all topologies") {
  for (std::size_t n = 1; n <= 5; ++n) testing::check_all_topologies(highs::backend(), n);
}
TEST_CASE("highs: checkmate on pyramids and trees") { testing::check_pebbles(highs::backend()); }
TEST_CASE("highs: restrictions against the unrestricted model") { testing::check_restrictions(highs::backend(), 14, 50); }
TEST_CASE("highs: the published form has the same optimum") { testing::check_published_form(highs::backend(), 15, 60); }
TEST_CASE("highs: sweep and staircase") { testing::check_sweep(highs::backend(), 16, 20); }
TEST_CASE("highs: rounding") { testing::check_rounding(highs::backend(), 17, 60); }
TEST_CASE("highs: solvers conform") { testing::check_conformance(highs::backend(), 15); }
TEST_CASE("highs: checkmate at the edges") { testing::check_edges(highs::backend()); }

TEST_CASE("highs: a library that is not there is named, with what to install") {
  CHECK(highs::backend::available());
  const highs::backend::options missing{.library = "/nonexistent/libhighs.so"};
  CHECK_FALSE(highs::backend::available(missing));
  CHECK_THROWS_AS(highs::backend(missing), not_available);
  CHECK_THROWS_WITH(highs::backend(missing),
                    Catch::Contains("pip install highspy") && Catch::Contains("/nonexistent/libhighs.so"));
  CHECK_THROWS_WITH(highs::backend({.library = "libm.so.6"}), Catch::Contains("has no function Highs_create"));
}
