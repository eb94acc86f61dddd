// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/chen.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_chen(const std::string&) { return chen(); }

}  // namespace remat::registry
