// SPDX-License-Identifier: Apache-2.0
// Your own graph type and cost model. The library requires no base class.
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include <remat/graph/execute.hpp>
#include <remat/graph/solve.hpp>
#include <remat/io/timeline.hpp>
#include <remat/solver/min_cut.hpp>

struct layer {
  std::string name;
  std::vector<int> operands;
  double milliseconds;
  std::int64_t bytes;
};

struct network {
  std::vector<layer> layers;
  std::vector<int> ids;
  void add(const layer& x) {
    ids.push_back(static_cast<int>(layers.size()));
    layers.push_back(x);
  }
};

// Traits: how the library reads the graph.
template <>
struct remat::dag_traits<network> {
  using vertex = int;
  static const auto& vertices(const network& n) { return n.ids; }
  static const auto& inputs(const network& n, int v) { return n.layers[static_cast<std::size_t>(v)].operands; }
  static std::size_t index(const network&, int v) { return static_cast<std::size_t>(v); }
};

// Cost model: time and bytes of each operation.
struct measured {
  const network& n;
  const layer& at(int v) const { return n.layers[static_cast<std::size_t>(v)]; }
  double seconds(int v) const { return at(v).milliseconds * 1e-3; }
  std::int64_t bytes(int v) const { return at(v).bytes; }
  const std::string& name(int v) const { return at(v).name; }
};
static_assert(remat::cost_model_with<measured, network, remat::cost_member::name>);  // a misspelt member would be ignored

// Visitor: prints each step of a schedule. The visitor of own_framework.cpp runs the steps.
struct printer {
  const network& n;
  void compute(int v) { std::cout << n.layers[static_cast<std::size_t>(v)].name << " "; }
  void drop(int v, std::size_t) { std::cout << "-" << n.layers[static_cast<std::size_t>(v)].name << " "; }
};

int main() {
  // Six layers and their gradients: gradient i reads the activation before layer i and the gradient after it.
  network n;
  n.add({"x", {}, 0.1, 4 << 20});
  for (int i = 1; i <= 6; ++i) n.add({"f" + std::to_string(i), {i - 1}, 1.0, 4 << 20});
  for (int i = 6; i >= 1; --i) n.add({"g" + std::to_string(i), {i - 1, static_cast<int>(n.layers.size()) - 1}, 2.0, 4 << 20});

  const auto r = remat::solve(n, measured{n}, 21 << 20, remat::min_cut{});
  std::cout << remat::to_string(r.status) << ": peak " << remat::format_bytes(r.peak) << ", " << remat::format_seconds(r.seconds)
            << ", bound " << remat::format_seconds(r.bound) << "\n";
  if (!r.found()) return 1;
  remat::execute(r, r.schedule, printer{n});
  std::cout << "\n" << remat::timeline_text(remat::trace(r, r.schedule).memory, {.budget = r.budget}, 60, 8);
}
