// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/revolve.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_revolve(const std::string&) { return revolve(); }

}  // namespace remat::registry
