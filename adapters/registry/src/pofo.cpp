// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/pofo.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_pofo(const std::string&) { return pofo(); }

}  // namespace remat::registry
