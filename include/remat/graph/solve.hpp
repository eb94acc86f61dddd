// SPDX-License-Identifier: Apache-2.0
/// @file
/// `solve` for any graph and cost model.
#pragma once

#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/graph/freeze.hpp>

namespace remat {

/// A result, and the vertices behind the indices of its schedule.
/// @tparam G a `dag`
template <class G>
struct graph_result : result {
  std::vector<vertex_t<G>> operations;  ///< vertex of each operation
  std::vector<vertex_t<G>> values;      ///< vertex of each value
};

/// Looks for the fastest schedule of a graph within `budget`: `freeze`, then `solve` of the problem.
/// @tparam G         a graph
/// @tparam C         its costs
/// @tparam S         the method
/// @tparam O         observers
/// @param g          the graph
/// @param c          the costs
/// @param budget     bytes for everything on the device, held sources included; >= 0
/// @param s          the method
/// @param l          limits of the search
/// @param observers  callables on `const progress&`; any may return `control::stop`
/// @return the schedule, what is known of it, and the vertices that its steps are about
/// @throws what `freeze` and `solve` throw
/// Complexity: that of `freeze` and of the solver.
/// @code
/// auto r = remat::solve(net, measured{&net}, 1 << 30, remat::rotor{}, {.seconds = 10});
/// for (auto o : remat::compute_order(r.schedule)) run(r.operations[o]);
/// @endcode
template <dag G, cost_model<G> C, solver S, observer... O>
graph_result<G> solve(const G& g, const C& c, bytes_t budget, const S& s, const limits& l = {}, O&&... observers) {
  auto f = freeze(g, c);
  graph_result<G> r;
  static_cast<result&>(r) = solve(f.problem, budget, s, l, std::forward<O>(observers)...);
  r.operations = std::move(f.operations);
  r.values = std::move(f.values);
  return r;
}

}  // namespace remat
