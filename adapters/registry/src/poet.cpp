// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/poet.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_poet(const std::string& backend, option_reader&) { return poet<milp::any_backend>({}, make_backend(backend)); }

}  // namespace remat::registry
