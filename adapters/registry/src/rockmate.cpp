// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/rockmate.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_rockmate(const std::string& backend) {
  if (no_milp(backend)) return rockmate<>();
  return rockmate<any_solver>(make_checkmate_fast(backend));
}

}  // namespace remat::registry
