// SPDX-License-Identifier: Apache-2.0
/// @file
/// A solver that is chosen at run time.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <remat/core/pareto_curve.hpp>

namespace cli {

/// Any solver, by value.
class any_solver {
 public:
  template <remat::solver S>
  any_solver(S s)  // NOLINT: every solver is one
      : name_(s.name()), solve_([s](const auto& p, auto budget, auto& m) { return s.solve(p, budget, m); }) {
    if constexpr (remat::sweeping_solver<S>)
      sweep_ = [s](const auto& p, const auto& budgets, auto& m) { return s.sweep(p, budgets, m); };
  }

  std::string name() const { return name_; }
  remat::result solve(const remat::problem& p, remat::bytes_t budget, remat::monitor& m) const { return solve_(p, budget, m); }
  /// Nothing, if the solver shares no work between budgets.
  std::vector<remat::result> sweep(const remat::problem& p, const std::vector<remat::bytes_t>& budgets, remat::monitor& m) const {
    return sweep_ ? sweep_(p, budgets, m) : std::vector<remat::result>{};
  }

 private:
  std::string name_;
  std::function<remat::result(const remat::problem&, remat::bytes_t, remat::monitor&)> solve_;
  std::function<std::vector<remat::result>(const remat::problem&, const std::vector<remat::bytes_t>&, remat::monitor&)> sweep_;
};

}  // namespace cli
