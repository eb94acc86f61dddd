// SPDX-License-Identifier: Apache-2.0
#include "instances.hpp"

#include <remat/io/json.hpp>

remat::problem remat::testing::instance(const std::string& name) {
  return read_problem(std::string(REMAT_SOURCE_DIR) + "/bench/instances/" + name + ".json");
}
