// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/revolve.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_revolve(const std::string&, option_reader& read) {
  revolve::options o;
  read("links", o.links, 1, 2000, "blocks for the dynamic program");
  read("slots", o.slots, 1, most_slots, "units of memory of the dynamic program");
  return revolve(o);
}

}  // namespace remat::registry
