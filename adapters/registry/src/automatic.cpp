// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/automatic_milp.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_automatic(const std::string& backend, option_reader& read) {
  const auto options = [&](auto o) {
    read("small_operations", o.small_operations, 0, most_operations, "larger problems are planned in parts as well");
    read("moment_operations", o.moment_operations, 0, most_operations, "larger problems get no bound from several moments");
    read("staged_operations", o.staged_operations, 0, most_operations, "larger problems are not tried with a staged MILP");
    return o;
  };
  if (without_milp(backend)) return automatic<>(options(automatic<>::options()));
  using with_milp = automatic<milp::any_backend>;
  return with_milp(options(with_milp::options()), make_backend(backend));
}

}  // namespace remat::registry
