// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/improved.hpp>
#include <remat/solver/min_cut.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_improved(const std::string&, option_reader&) { return improved<min_cut>(); }

}  // namespace remat::registry
