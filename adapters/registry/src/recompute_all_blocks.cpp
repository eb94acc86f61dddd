// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/recompute_all_blocks.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_recompute_all_blocks(const std::string&, option_reader&) { return recompute_all_blocks(); }

}  // namespace remat::registry
