// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/hiremate.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_hiremate(const std::string& backend, option_reader& read) {
  using type = hiremate<milp::any_backend, any_solver>;
  type::options o;
  read_parts(o, read);
  read("choices", o.choices, 1, 100, "options of a part that the integer program may choose from");
  return type(o, make_backend(backend), solver_of_parts(backend));
}

}  // namespace remat::registry
