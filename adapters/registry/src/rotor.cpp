// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/rotor.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_rotor(const std::string&) { return rotor(); }

}  // namespace remat::registry
