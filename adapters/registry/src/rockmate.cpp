// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/rockmate.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

any_solver make_rockmate(const std::string& backend, option_reader& read) {
  const auto options = [&](auto o) {
    read_parts(o, read);
    read("slots", o.slots, 1, most_slots, "units of memory of the dynamic program");
    return o;
  };
  if (without_milp(backend)) return rockmate<>(cheap_default<min_cut>(), options(rockmate<>::options()));
  using with_milp = rockmate<any_solver>;
  return with_milp(solver_of_parts(backend), options(with_milp::options()));
}

}  // namespace remat::registry
