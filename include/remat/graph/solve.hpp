// SPDX-License-Identifier: Apache-2.0
/// @file
/// `solve` for any graph and cost model.
#pragma once

#include <utility>

#include <remat/core/solve.hpp>
#include <remat/graph/freeze.hpp>

namespace remat {

/// The result for a graph, with its frozen problem and the vertex of each operation and value.
/// @tparam G a `dag`
template <class G>
struct graph_result : result, frozen<G> {};

/// Looks for the fastest schedule of a graph within `budget`: `freeze`, then `solve` of the problem.
/// @tparam G         a graph
/// @tparam C         its costs
/// @tparam S         the method
/// @tparam O         observers
/// @param g          the graph
/// @param c          the costs
/// @param o          name of the problem, rates of copies
/// @param budget     bytes for everything on the device, held sources included; >= 0
/// @param s          the method
/// @param l          limits of the search
/// @param observers  callables on `const progress&`; any may return `control::stop`
/// @return the schedule with its costs and bounds, the problem, and the vertex of each operation and value
/// @throws what `freeze` and `solve` throw
/// Complexity: that of `freeze` and of the solver.
/// @code
/// auto r = remat::solve(net, measured{&net}, 1 << 30, remat::rotor{}, {.seconds = 10});
/// if (r.found()) remat::execute(r, r.schedule, device);
/// @endcode
template <dag G, cost_model<G> C, solver S, observer... O>
graph_result<G> solve(const G& g, const C& c, const freeze_options& o, bytes_t budget, const S& s, const limits& l = {},
                      O&&... observers) {
  graph_result<G> r{{}, freeze(g, c, o)};
  static_cast<result&>(r) = solve(r.problem, budget, s, l, std::forward<O>(observers)...);
  return r;
}
/// As above, with default options.
template <dag G, cost_model<G> C, solver S, observer... O>
graph_result<G> solve(const G& g, const C& c, bytes_t budget, const S& s, const limits& l = {}, O&&... observers) {
  return solve(g, c, freeze_options{}, budget, s, l, std::forward<O>(observers)...);
}

}  // namespace remat
