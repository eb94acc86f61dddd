// SPDX-License-Identifier: Apache-2.0
// expect: has_cost
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
struct measured {
  double seconds(int) const { return 1; }
  long bytes(int) const { return 1; }
  long worksapce(int) const { return 1; }
  bool once(int) const { return true; }
};
static_assert(remat::cost_model_with<measured, network, remat::cost_member::once>);
// broken
static_assert(remat::cost_model_with<measured, network, remat::cost_member::workspace, remat::cost_member::once>);
// end
