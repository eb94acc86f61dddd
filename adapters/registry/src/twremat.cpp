// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/twremat.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_twremat(const std::string&) { return twremat(); }

}  // namespace remat::registry
