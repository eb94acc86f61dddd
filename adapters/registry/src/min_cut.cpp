// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/min_cut.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_min_cut(const std::string&) { return min_cut(); }

}  // namespace remat::registry
