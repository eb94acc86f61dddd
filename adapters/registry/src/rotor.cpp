// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/rotor.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_rotor(const std::string&, option_reader& read) {
  rotor::options o;
  read("slots", o.slots, 1, most_slots, "units of memory of a table");
  read("table_links", o.table_links, 1, 2000, "longer chains are searched without a table");
  read("labels", o.labels, 1, std::size_t{1} << 24, "labels of the search");
  return rotor(o);
}

}  // namespace remat::registry
