// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/glpk/backend.hpp>

#include "../../../tests/milp/check_staged_neighbourhood.hpp"

using namespace remat;

TEST_CASE("glpk: staged neighbourhoods") { testing::check_staged_neighbourhood<glpk::backend>(32, 60); }
