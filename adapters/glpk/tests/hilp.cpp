// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>

#include "../../../tests/backend/checks.hpp"

using namespace remat;

TEST_CASE("glpk: the hierarchical ILP of single operations is the staged optimum") {
  testing::check_hilp_of_operations(glpk::backend(), 31, 60);
}
TEST_CASE("glpk: the hierarchical ILP of parts, against every selection of options") {
  testing::check_hilp_of_parts(glpk::backend(), 10, 100);
}
TEST_CASE("glpk: hiremate") { testing::check_hiremate(glpk::backend()); }
