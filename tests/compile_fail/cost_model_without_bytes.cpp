// SPDX-License-Identifier: Apache-2.0
// expect: c.bytes(v)
// expect: cost_model
#include <vector>

#include <remat/graph/freeze.hpp>

struct network {
  std::vector<std::vector<int>> operands;
  std::vector<int> ids;
};
template <>
struct remat::dag_traits<network> {
  using vertex = int;
  static const auto& vertices(const network& n) { return n.ids; }
  static const auto& inputs(const network& n, int v) { return n.operands[v]; }
  static std::size_t index(const network&, int v) { return v; }
};
struct timed {
  double seconds(int) const { return 1; }
};
// broken
auto frozen = remat::freeze(network{}, timed{});
// end
