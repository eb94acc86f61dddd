// SPDX-License-Identifier: Apache-2.0
// Plans a Boost graph without conversion; its property maps are the costs. The graph is a residual block with its gradient.
#include <iostream>
#include <string>

#include <boost/graph/adjacency_list.hpp>

#include <remat/graph/boost.hpp>
#include <remat/graph/execute.hpp>
#include <remat/graph/solve.hpp>
#include <remat/graph/table.hpp>
#include <remat/io/bytes.hpp>
#include <remat/solver/min_cut.hpp>

struct op {
  std::string name;
  double seconds;
  long bytes;
  bool weight;
};

template <class G>
struct printer {
  const G& g;
  void compute(std::size_t v) { std::cout << " " << g[v].name << ";"; }
  void drop(std::size_t v, std::size_t) { std::cout << " -" << g[v].name << ";"; }
};

int main() {
  boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, op> g;
  const auto add = [&](const char* name, std::initializer_list<std::size_t> operands, double seconds, long bytes,
                       bool weight = false) {
    const auto v = add_vertex(op{name, seconds, bytes, weight}, g);
    for (auto u : operands) add_edge(u, v, g);  // an edge runs to the reader
    return v;
  };
  const auto w = add("weight", {}, 0, 100, true);
  const auto x = add("input", {}, 1e-3, 100);
  const auto conv = add("conv", {x, w}, 4e-3, 100);
  const auto relu = add("relu", {conv}, 1e-3, 100);
  const auto sum = add("sum", {x, relu}, 1e-3, 100);
  const auto loss = add("loss", {sum}, 1e-3, 10);
  const auto grad_sum = add("grad sum", {loss, sum}, 1e-3, 100);
  const auto grad_conv = add("grad conv", {grad_sum, relu, w}, 4e-3, 100);
  add("grad weight", {grad_conv, x}, 4e-3, 100);

  const remat::table costs{remat::seconds_of(get(&op::seconds, g)), remat::bytes_of(get(&op::bytes, g)),
                           remat::held_of(get(&op::weight, g)), remat::name_of(get(&op::name, g))};
  for (remat::bytes_t budget : {600, 450, 350}) {
    const auto r = remat::solve(g, costs, budget, remat::min_cut{});
    std::cout << "budget " << remat::format_bytes(budget) << ": " << remat::to_string(r.status);
    if (r.found()) std::cout << ", peak " << remat::format_bytes(r.peak) << ", " << remat::format_seconds(r.seconds) << ",";
    if (r.found())
      remat::execute(r, r.schedule, printer<decltype(g)>{g});
    else
      std::cout << ", every budget is at least " << remat::format_bytes(r.budget_bound);
    std::cout << "\n";
  }
}
