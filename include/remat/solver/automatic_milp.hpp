// SPDX-License-Identifier: Apache-2.0
/// @file
/// `automatic` with a MILP library. Needs Boost.Graph and Eigen.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

#include <remat/bound/multi_cut_bound.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solver.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/automatic.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/proving.hpp>

namespace remat {

/// The parts of `automatic<B>` that need a MILP backend. Users only include this header.
///
/// @tparam B the MILP backend
///
/// Complexity: that of `checkmate`, of `bound::multi_cut_bound` and of `proving`.
/// @code
/// remat::automatic<remat::highs::backend> method;
/// auto r = remat::solve(p, budget, method, {.seconds = 10, .gap = 0.01});
/// if (r.found()) std::cout << r.seconds << " s, within " << 100 * r.gap() << " % of the optimum\n";
/// @endcode
template <class B>
requires milp::backend<B>
struct automatic_milp<B> {
  /// Solves a problem with copies by `inner`. Then improves the bound if the problem has at most `max_operations` operations.
  /// @throws any exception of the solver and the backend
  template <solver Inner>
  static result prove_copies(Inner inner, const B& backend, std::size_t max_operations, const problem& p, bytes_t budget,
                             monitor& m) {
    return proving<Inner, B>(std::move(inner), backend, max_operations).solve(p, budget, m);
  }

  /// Computes the bound from several moments at once.
  /// @param on_order called with the order in each solution of a MILP, if the solution has one; returns the time of the best
  ///                 schedule, s
  /// @return bounds on the time, s, and on the budget, bytes
  /// @throws any exception of the backend
  template <class OnOrder>
  static bound::time_bound bound_time(const B& backend, const problem& p, bytes_t budget, monitor& m, OnOrder&& on_order) {
    return bound::multi_cut_bound<B>(p, budget, m, {}, backend, [&](const auto& form, const auto& x, double) {
      return on_order(bound::order_of(p, form, x));
    });
  }

  /// The solver of the staged MILP, which starts from `start`.
  static checkmate<B> staged(const B& backend, std::optional<schedule> start) {
    auto options = checkmate<B>::options::balanced();
    options.start = std::move(start);
    return checkmate<B>(options, backend);
  }
};

}  // namespace remat
