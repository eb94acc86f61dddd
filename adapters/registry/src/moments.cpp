// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/moments.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_moments(const std::string& backend, option_reader&) {
  return moments<milp::any_backend>({}, make_backend(backend));
}

}  // namespace remat::registry
