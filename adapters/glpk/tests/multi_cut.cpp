// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>

#include "../../../tests/backend/checks.hpp"

using namespace remat;

TEST_CASE("glpk: bounds from moments are never above the optimum") { testing::check_moment_forms(glpk::backend(), 21, 3000); }
TEST_CASE("glpk: bounds from moments in any order are never above the optimum") {
  testing::check_moment_orders(glpk::backend(), 23, 2000);
}
TEST_CASE("glpk: the order of moments is part of the bound") { testing::check_order_of_moments(glpk::backend()); }
TEST_CASE("glpk: schedules from moments") { testing::check_moments(glpk::backend()); }
