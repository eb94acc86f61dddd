// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/checkmate_rounding.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_checkmate_rounding(const std::string& backend) {
  return checkmate_rounding<milp::any_backend>({}, make_backend(backend));
}

}  // namespace remat::registry
