// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/highs/backend.hpp>

#include "../../../tests/solver/check_multi_cut.hpp"

using namespace remat;

TEST_CASE("highs: bounds from moments are never above the optimum") { testing::check_moment_forms<highs::backend>(21, 1000); }
TEST_CASE("highs: bounds from moments with copies are never above the optimum") {
  testing::check_moment_forms_with_copies<highs::backend>(22, 1000);
}
TEST_CASE("highs: schedules from moments") { testing::check_moments<highs::backend>(); }
