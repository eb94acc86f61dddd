// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/checkmate.hpp>
#include <remat/staged/published_form.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_checkmate_published(const std::string& backend, option_reader&) {
  return checkmate<milp::any_backend, staged::published_form>({}, make_backend(backend));
}

}  // namespace remat::registry
