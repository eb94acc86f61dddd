// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/checkmate.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

using checkmate_type = checkmate<milp::any_backend>;

any_solver make_checkmate(const std::string& backend) { return checkmate_type({}, make_backend(backend)); }
any_solver make_checkmate_fast(const std::string& backend) {
  return checkmate_type(checkmate_type::options::fast(), make_backend(backend));
}
any_solver make_checkmate_balanced(const std::string& backend) {
  return checkmate_type(checkmate_type::options::balanced(), make_backend(backend));
}

}  // namespace remat::registry
