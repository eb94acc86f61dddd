// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/checkmate_rounding.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

using checkmate_rounding_type = checkmate_rounding<milp::any_backend>;

any_solver make_checkmate_rounding(const std::string& backend) { return checkmate_rounding_type({}, make_backend(backend)); }
any_solver make_checkmate_repaired(const std::string& backend) {
  return checkmate_rounding_type(checkmate_rounding_type::options::repaired(), make_backend(backend));
}

}  // namespace remat::registry
