// SPDX-License-Identifier: Apache-2.0
/// @file
/// From a schedule back to the graph: what to run and what to free, in terms of its vertices.
#pragma once

#include <cstddef>
#include <string>

#include <remat/core/error.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/schedule.hpp>
#include <remat/graph/freeze.hpp>

namespace remat {

/// Something that runs the steps of a schedule.
///
/// | expression         | to be done                                                                                |
/// |--------------------|-------------------------------------------------------------------------------------------|
/// | `x.compute(v)`     | run `v`; its inputs are there; buffers for all its results are needed                     |
/// | `x.drop(v, k)`     | free the buffer of result `k` of `v`                                                      |
/// | `x.offload(v, k)`  | begin to copy it to the host (only for problems that allow copies)                        |
/// | `x.prefetch(v, k)` | make a buffer for it and begin to copy it back (only for problems that allow copies)      |
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

/// A `schedule_visitor` that copies.
template <class X, class G>
concept copying_visitor = schedule_visitor<X, G> && requires(X& x, const vertex_t<G>& v, std::size_t k) {
  x.offload(v, k);
  x.prefetch(v, k);
};

/// Runs a schedule: tells `x` what to do, step by step, in terms of the graph. A `compute` writes all results of its
/// vertex anew, those that are there too.
///
/// Nothing is run unless all of it can be: the schedule is judged by `evaluate` first.
/// @tparam G a graph
/// @tparam X what runs it
/// @param f the frozen graph, or the `graph_result` of `solve`
/// @param s a schedule of `f.problem`
/// @param x is told of each step
/// @throws bad_schedule naming the step, before anything is run: one that breaks a rule, or a copy where `x` cannot copy; what
///         `x` throws
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
