// SPDX-License-Identifier: Apache-2.0
#include <catch2/catch.hpp>

#include <remat/highs/backend.hpp>

#include "../../../tests/milp/check_staged_neighbourhood.hpp"

using namespace remat;

TEST_CASE("highs: staged neighbourhoods") { testing::check_staged_neighbourhood<highs::backend>(31, 60); }
