// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/offmate.hpp>
#include <remat/solver/proving.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_offmate(const std::string& backend) {
  if (no_milp(backend)) return offmate<>();
  return proving<offmate<>, milp::any_backend>(offmate<>(), make_backend(backend));
}

}  // namespace remat::registry
