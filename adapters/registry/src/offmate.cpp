// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/offmate.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_offmate(const std::string&) { return offmate<>(); }

}  // namespace remat::registry
