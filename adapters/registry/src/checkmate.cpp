// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/checkmate.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

using checkmate_type = checkmate<milp::any_backend>;

namespace {

any_solver made_checkmate(checkmate_type::options o, const std::string& backend, option_reader& read) {
  read("rules.small_values", o.rules.small_values, 0, 0.99, "share of the budget for small values that stay to their last use");
  read("rules.last_stage", o.rules.last_stage, "one more stage, in which targets may be computed again");
  read("restricted_first", o.restricted_first, "begin with the answer of a smaller program");
  return checkmate_type(o, make_backend(backend));
}

}  // namespace

any_solver make_checkmate(const std::string& backend, option_reader& read) { return made_checkmate({}, backend, read); }
any_solver make_checkmate_fast(const std::string& backend, option_reader& read) {
  return made_checkmate(checkmate_type::options::fast(), backend, read);
}
any_solver make_checkmate_balanced(const std::string& backend, option_reader& read) {
  return made_checkmate(checkmate_type::options::balanced(), backend, read);
}
any_solver solver_of_parts(const std::string& backend) {
  return checkmate_type(checkmate_type::options::fast(), make_backend(backend));
}

}  // namespace remat::registry
