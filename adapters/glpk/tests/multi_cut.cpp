// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>

#include "../../../tests/backend/checks.hpp"
#include "../../../tests/rounds.hpp"

using namespace remat;

TEST_CASE("glpk: multi_cut_bound is never above the optimum") {
  testing::check_moment_forms(glpk::backend(), 21, testing::shortened(3000));
}
TEST_CASE("glpk: multi_cut_bound with moments in any order is never above the optimum") {
  testing::check_moment_orders(glpk::backend(), 23, testing::shortened(2000));
}
TEST_CASE("glpk: the order of moments strengthens multi_cut_bound") { testing::check_order_of_moments(glpk::backend()); }
TEST_CASE("glpk: the solver of moments conforms to the solver suite and proves optima") {
  testing::check_moments(glpk::backend());
}
