// SPDX-License-Identifier: Apache-2.0
// expect: dag_traits<std::vector<int>
// expect: constraint
#include <vector>

#include <remat/graph/freeze.hpp>

struct costs {
  double seconds(int) const { return 1; }
  long bytes(int) const { return 1; }
};
// broken
auto frozen = remat::freeze(std::vector<int>{}, costs{});
// end
