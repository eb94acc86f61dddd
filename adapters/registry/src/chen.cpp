// SPDX-License-Identifier: Apache-2.0
#include <remat/solver/chen.hpp>

#include "make.hpp"

namespace remat::registry {

any_solver make_chen(const std::string&, option_reader& read) {
  chen::options o;
  read("tries", o.tries, 1, 100'000, "numbers of segments that are tried");
  return chen(o);
}

}  // namespace remat::registry
