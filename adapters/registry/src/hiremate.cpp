// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/hiremate.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_hiremate(const std::string& backend) {
  return hiremate<milp::any_backend, any_solver>({}, make_backend(backend), make_checkmate_fast(backend));
}

}  // namespace remat::registry
