// SPDX-License-Identifier: Apache-2.0
/// @file
/// The interface of a MILP backend, and `solve`, through which alone the library calls one. Needs Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include <remat/core/monitor.hpp>
#include <remat/milp/model.hpp>

namespace remat::milp {

/// How a backend ended.
enum class status {
  optimal,     ///< `x` is within `options.gap` of `bound`
  feasible,    ///< `x` satisfies the model; a limit or `poll` ended the search
  infeasible,  ///< proven: the model has no solution
  unbounded,   ///< proven: the objective has no lower bound
  cutoff,      ///< proven: no solution has an objective below `options.cutoff`
  limit,       ///< no solution when a limit or `poll` ended the search
  failed       ///< nothing is known: numerical trouble, numbers too large, or something that the backend needs is missing
};

/// Limits and hints for a backend.
struct options {
  double seconds = infinity;                  ///< wall-clock time, s, >= 0
  double gap = 1e-6;                          ///< relative gap (objective - bound) / |objective| at which to stop, in [0, 1)
  double cutoff = infinity;                   ///< solutions with an objective >= this are useless
  std::optional<Eigen::VectorXd> start = {};  ///< a solution to start from; ignored unless it satisfies the model
  unsigned threads = 1;                       ///< worker threads, >= 1
  std::uint64_t seed = 0;
  /// Called now and then with the best objective so far (infinity before the first) and the bound; returns true to stop the
  /// backend. Calls come from any thread, but never from two at once.
  std::function<bool(double best, double bound)> poll = {};

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (!(seconds >= 0)) throw bad_option("milp::options.seconds must be >= 0, got " + std::to_string(seconds));
    if (!(gap >= 0 && gap < 1)) throw bad_option("milp::options.gap must be in [0, 1), got " + std::to_string(gap));
    if (!(cutoff > -infinity)) throw bad_option("milp::options.cutoff must be a number, got " + std::to_string(cutoff));
    if (threads < 1) throw bad_option("milp::options.threads must be >= 1, got 0");
  }
};

/// The options for a backend that may use all that is left of the limits of a search.
inline options options_within(const monitor& m) {
  return {.seconds = m.remaining(), .gap = m.limits().gap, .threads = m.limits().threads, .seed = m.limits().seed};
}

/// The answer of a backend.
struct solution {
  milp::status status = milp::status::failed;
  Eigen::VectorXd x;            ///< empty unless `found()`
  double objective = infinity;  ///< of `x`
  double bound = -infinity;     ///< proven lower bound on the objective of every solution

  bool found() const { return status == milp::status::optimal || status == milp::status::feasible; }
};

/// A library that solves a valid `model` with at least one column. `solve` is const and may run in several threads at once.
///
/// A backend may also have a member `longest_row`, static or not, that converts to `std::size_t`. Rows with more entries slow the
/// library down, so models use running sums instead.
/// @code
/// static_assert(remat::milp::backend<remat::highs::backend>);
/// static_assert(!remat::milp::backend<int>);
/// @endcode
template <class B>
concept backend = requires(const B& b, const model& m, const options& o) {
  { b.name() } -> std::convertible_to<std::string>;
  { b.solve(m, o) } -> std::same_as<solution>;
};

/// `b.longest_row`, or no limit.
template <backend B>
std::size_t longest_row([[maybe_unused]] const B& b) {
  if constexpr (requires {
                  { b.longest_row } -> std::convertible_to<std::size_t>;
                })
    return b.longest_row;
  else
    return std::numeric_limits<std::size_t>::max();
}

/// Solves `m` and checks the answer. `x` is rounded in integer columns, and its objective is computed anew. If `x` violates the
/// model, or the model is not tractable, the status is `failed`. A start that satisfies the model is never lost, and refutes any
/// claim that contradicts it. `optimal` without a matching bound becomes `feasible`.
/// @tparam B the backend
/// @param b  the backend
/// @param m  the model
/// @param o  limits, cutoff and start
/// @return the solution; `bound <= objective`, and the bound is infinity for `infeasible`
/// @throws bad_problem, bad_option for a model or options out of range; any exception of the backend
/// Complexity: exponential in the number of integer columns.
template <backend B>
solution solve(const B& b, const model& m, const options& o = {}) {
  m.validate();
  o.validate();
  solution s;
  const bool started = o.start && violation(m, *o.start).empty();
  if (m.columns() == 0) {
    s.status = violation(m, {}).empty() ? status::optimal : status::infeasible;
    s.objective = s.bound = m.offset;
  } else if (!m.tractable()) {
    s.status = status::failed;
  } else if (o.start && !started) {
    auto without = o;
    without.start.reset();
    s = b.solve(m, without);
  } else {
    s = b.solve(m, o);
  }
  if (s.found()) {
    if (s.x.size() == m.columns())
      for (Eigen::Index j = 0; j < m.columns(); ++j)
        if (m.integer[static_cast<std::size_t>(j)] && std::abs(s.x[j] - std::round(s.x[j])) < 1e-5) s.x[j] = std::round(s.x[j]);
    if (!violation(m, s.x).empty()) s = {};
  }
  if (std::isnan(s.bound)) s.bound = -infinity;
  if (started && s.status != status::unbounded &&
      m.objective(*o.start) < (s.found() ? std::min(m.objective(s.x), o.cutoff) : o.cutoff)) {
    if (!s.found() && s.status != status::limit) s.bound = -infinity;
    s.status = status::feasible;
    s.x = *o.start;
  }
  if (s.found()) {
    s.objective = m.objective(s.x);
    s.bound = std::min(s.bound, s.objective);
    if (s.objective - s.bound > o.gap * std::abs(s.objective) + 1e-5 * std::max(1.0, std::abs(s.objective)))
      s.status = status::feasible;
    if (s.bound >= o.cutoff) s.status = status::cutoff;
  }
  if (!s.found()) {
    s.x.resize(0);
    s.objective = infinity;
    if (s.status == status::infeasible) s.bound = infinity;
    if (s.status == status::cutoff) s.bound = o.cutoff;
  }
  return s;
}

}  // namespace remat::milp
