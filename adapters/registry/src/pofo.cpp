// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/pofo.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_pofo(const std::string&, option_reader& read) {
  pofo::options o;
  read("slots", o.slots, 1, most_slots, "units of memory of the table of recomputations");
  read("labels", o.labels, 1, 100'000, "labels of the recurrence");
  return pofo(o);
}

}  // namespace remat::registry
