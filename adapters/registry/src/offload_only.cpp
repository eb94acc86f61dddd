// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/offload_only.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_offload_only(const std::string&, option_reader&) { return offload_only(); }

}  // namespace remat::registry
