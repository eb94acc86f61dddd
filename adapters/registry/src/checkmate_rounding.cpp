// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/checkmate_rounding.hpp>

#include "backend.hpp"
#include "make.hpp"

namespace remat::registry {

using checkmate_rounding_type = checkmate_rounding<milp::any_backend>;

namespace {

any_solver made_rounding(checkmate_rounding_type::options o, const std::string& backend, option_reader& read) {
  std::size_t thresholds = o.thresholds;
  read("thresholds", thresholds, 1, 1000, "thresholds of the relaxation from which values are kept");
  read("repair", o.repair, "evict where the budget is exceeded, retain where there is room");
  o.thresholds = static_cast<unsigned>(thresholds);
  return checkmate_rounding_type(o, make_backend(backend));
}

}  // namespace

any_solver make_checkmate_rounding(const std::string& backend, option_reader& read) { return made_rounding({}, backend, read); }
any_solver make_checkmate_repaired(const std::string& backend, option_reader& read) {
  return made_rounding(checkmate_rounding_type::options::repaired(), backend, read);
}

}  // namespace remat::registry
