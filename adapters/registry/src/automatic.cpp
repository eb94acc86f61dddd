// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/automatic.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_automatic(const std::string& backend) {
  if (no_milp(backend)) return automatic<>();
  return automatic<milp::any_backend>({}, make_backend(backend));
}

}  // namespace remat::registry
