// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/min_cut.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_min_cut(const std::string&, option_reader& read) {
  min_cut::options o;
  read("moments", o.moments, 1, 1000, "operations across which retention is optimised");
  read("cuts", o.cuts, 2, 10'000, "cuts per moment");
  read("mixtures", o.mixtures, 1, 1000, "mixtures of each two neighbouring cuts");
  read("bound", o.bound, "prove a lower bound as well");
  read("repairs", o.repairs, 0, most_rounds, "operations times starts that are made to fit");
  read("effort", o.effort, 0, most_rounds, "effort of the local search; 0: none");
  return min_cut(o);
}

}  // namespace remat::registry
