// SPDX-License-Identifier: Apache-2.0
// expect: has_inputs
// expect: has_outputs
#include <vector>

#include <remat/graph/dag.hpp>

struct points {
  std::vector<int> ids;
};
template <>
struct remat::dag_traits<points> {
  using vertex = int;
  static const auto& vertices(const points& p) { return p.ids; }
  static std::size_t index(const points&, int v) { return v; }
};
// broken
static_assert(remat::dag<points>);
// end
