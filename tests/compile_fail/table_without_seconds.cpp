// SPDX-License-Identifier: Apache-2.0
// expect: c.seconds(v)
#include <vector>

#include <remat/graph/freeze.hpp>
#include <remat/graph/table.hpp>

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
const remat::table cost{remat::bytes_of([](int) { return 1; })};
// broken
static_assert(remat::cost_model<decltype(cost), network>);
// end
