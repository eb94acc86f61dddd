// SPDX-License-Identifier: Apache-2.0
// expect: x.drop(v, k)
// expect: schedule_visitor
#include <vector>

#include <remat/graph/execute.hpp>

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
struct forgetful {
  void compute(int) {}
};
void run(const remat::frozen<network>& f, const remat::schedule& s, forgetful& x) {
  // broken
  remat::execute(f, s, x);
  // end
}
