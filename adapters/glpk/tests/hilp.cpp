// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>

#include "../../../tests/backend/checks.hpp"
#include "../../../tests/rounds.hpp"

using namespace remat;

TEST_CASE("glpk: on single operations the hierarchical ILP finds the staged optimum") {
  testing::check_hilp_of_operations(glpk::backend(), 31, testing::shortened(60));
}
TEST_CASE("glpk: the hierarchical ILP of parts is no worse than any selection of options") {
  testing::check_hilp_of_parts(glpk::backend(), 10, 100);
}
TEST_CASE("glpk: hiremate and its joiner conform to the solver suite") { testing::check_hiremate(glpk::backend()); }
