// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/twremat.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_twremat(const std::string&, option_reader& read) {
  twremat::options o;
  read("shrink", o.shrink, 1.01, 100, "ratio of one size of undivided parts to the next");
  read("repetitions", o.repetitions, 1, 10'000, "how many times as long as store-all an order may be");
  return twremat(o);
}

}  // namespace remat::registry
