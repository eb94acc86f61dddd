// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/highs/backend.hpp>

#include "../../../tests/backend/checks.hpp"
#include "../../../tests/rounds.hpp"

using namespace remat;

TEST_CASE("highs: on single operations the hierarchical ILP finds the staged optimum") {
  testing::check_hilp_of_operations(highs::backend(), 31, testing::shortened(200));
}
TEST_CASE("highs: the hierarchical ILP of parts is no worse than any selection of options", "[long]") {
  testing::check_hilp_of_parts(highs::backend(), 10, 100);
}
TEST_CASE("highs: hiremate and its joiner conform to the solver suite") { testing::check_hiremate(highs::backend()); }
