// SPDX-License-Identifier: Apache-2.0
// expect: observer
// expect: control
#include <remat/core/monitor.hpp>

struct answers_bool {
  bool operator()(const remat::progress&) { return true; }
};
// broken
static_assert(remat::observer<answers_bool>);
// end
