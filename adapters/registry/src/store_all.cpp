// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/store_all.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_store_all(const std::string&, option_reader&) { return store_all(); }

}  // namespace remat::registry
