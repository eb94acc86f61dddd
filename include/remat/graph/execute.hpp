// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs a schedule in terms of the vertices of a graph.
#pragma once

#include <cstddef>
#include <string>

#include <remat/core/error.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/schedule.hpp>
#include <remat/graph/freeze.hpp>

namespace remat {

/// A visitor that runs the steps of a schedule.
///
/// | expression         | task                                                                                      |
/// |--------------------|-------------------------------------------------------------------------------------------|
/// | `x.compute(v)`     | run `v`, whose inputs are on the device; make buffers for all its results                 |
/// | `x.drop(v, k)`     | free the buffer of result `k` of `v`                                                      |
/// | `x.offload(v, k)`  | begin to copy result `k` to the host (only for problems that allow copies)                |
/// | `x.prefetch(v, k)` | make a buffer for result `k`, begin to copy it back (only for problems that allow copies) |
/// @code
/// struct device { void compute(int v); void drop(int v, std::size_t result); };
/// static_assert(remat::schedule_visitor<device, network>);
/// static_assert(!remat::schedule_visitor<int, network>);
/// @endcode
template <class X, class G>
concept schedule_visitor = requires(X& x, const vertex_t<G>& v, std::size_t k) {
  x.compute(v);
  x.drop(v, k);
};

/// A `schedule_visitor` that can offload and prefetch.
template <class X, class G>
concept copying_visitor = schedule_visitor<X, G> && requires(X& x, const vertex_t<G>& v, std::size_t k) {
  x.offload(v, k);
  x.prefetch(v, k);
};

/// Runs a schedule: calls `x` for each step, with vertices of the graph. A `compute` writes all results of its vertex anew, even
/// results that exist.
///
/// `evaluate` judges the schedule first, so either no step runs or all steps can run.
/// @tparam G a graph
/// @tparam X the visitor
/// @param f the frozen graph, or the `graph_result` of `solve`
/// @param s a schedule of `f.problem`
/// @param x the visitor, called once per step
/// @throws bad_schedule naming a step that breaks a rule, or a copy if `x` cannot copy; both before any step runs. Also what `x`
///         throws
/// Complexity: O(values + edges executed), besides the calls.
/// @code
/// const auto r = remat::solve(net, measured{&net}, budget, remat::min_cut());
/// if (r.found()) remat::execute(r, r.schedule, device);
/// @endcode
template <class G, class X>
requires schedule_visitor<X, G>
void execute(const frozen<G>& f, const schedule& s, X&& x) {
  evaluate_plain(f.problem, s);
  if constexpr (!copying_visitor<X, G>)
    for (std::size_t at = 0; at < s.steps.size(); ++at)
      if (const auto what = s.steps[at].what; what == action::offload || what == action::prefetch)
        throw bad_schedule(at, "step " + std::to_string(at) + " (" + std::string(to_string(what)) + " " +
                                   f.problem.values()[s.steps[at].which].name + "): the visitor has no offload and prefetch");
  for (const auto& step : s.steps) {
    const auto what = step.what;
    const auto which = step.which;
    if (what == action::compute) {
      x.compute(f.operations[which]);
      continue;
    }
    const auto& [vertex, result] = f.values[which];
    if (what == action::drop) x.drop(vertex, result);
    if constexpr (copying_visitor<X, G>) {
      if (what == action::offload) x.offload(vertex, result);
      if (what == action::prefetch) x.prefetch(vertex, result);
    }
  }
}

}  // namespace remat
