// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules from the LP relaxation of Checkmate's MILP. Needs Eigen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/retain_more.hpp>
#include <remat/staged/strong_form.hpp>

namespace remat {

/// Rounds the LP relaxation of a staged MILP. A threshold decides which values are kept (S); the recomputations (R) follow.
///
/// By default as published: the unrestricted model at 90 % of the budget, without repair of a schedule over the budget.
/// `options::repaired()` solves a restricted model with several allowances, repairs schedules over the budget by evictions, and
/// replaces recomputations by retention where memory is left.
///
/// The relaxation at the full budget bounds the time of every schedule of `result.scope`.
///
/// @tparam B    the MILP backend; its LP solver is used
/// @tparam Form the MILP: `staged::strong_form` or `staged::published_form`
///
/// Complexity: a linear program per allowance; per threshold O(stages (operations + edges)) and the repair.
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020 (two-phase
/// rounding).
/// @code
/// remat::checkmate_rounding<remat::highs::backend> method;
/// auto r = remat::solve(p, budget, method, {.seconds = 10});
/// @endcode
template <milp::backend B, class Form = staged::strong_form>
class checkmate_rounding {
 public:
  struct options {
    staged::staging rules = {};  ///< restrictions
    /// Shares of the budget (less held bytes) that the relaxation must leave free, in [0, 1); one relaxation each. A relaxation
    /// with share 0 always comes first, because it gives `scope_bound`.
    std::vector<double> allowances = {0.1};
    unsigned thresholds = 9;  ///< number of thresholds, >= 1; the i-th keeps values with S >= i / (thresholds + 1)
    bool repair = false;      ///< evict where the budget is exceeded, retain values where memory is left

    /// Our variant: the restrictions of `checkmate::options::balanced()`, several allowances, and repair.
    static options repaired() { return {{false, true, true, {}, 0, 0.01, {}, true}, {0.05, 0.1, 0.2}, 11, true}; }
  };

  /// @throws bad_option naming the member that is out of range
  explicit checkmate_rounding(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {
    for (auto a : options_.allowances)
      if (!(a >= 0 && a < 1)) throw bad_option("checkmate_rounding.allowances must be in [0, 1), got " + std::to_string(a));
    if (options_.thresholds < 1) throw bad_option("checkmate_rounding.thresholds must be >= 1, got 0");
  }
  checkmate_rounding() : checkmate_rounding(options{}) {}

  std::string name() const { return "checkmate-rounding/" + std::string(backend_.name()); }

  /// @throws bad_option if `rules` are out of range; too_large if the model would be too large; any exception of the backend
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    const auto least = bounds_without_search(p);
    if (budget < least.budget) {
      r.status = status::infeasible;
      return r;
    }
    r.scope_bound = least.seconds;
    incumbent best(p, budget);
    const auto report = [&](const std::string& stage) {
      best.report(m, stage, least.seconds);
      return m.stopped();
    };
    best.offer(needed_operations(p));
    if (report("model")) return give(best, r);
    staged::require_size(name(), p);
    std::vector<double> allowances = {0};
    allowances.insert(allowances.end(), options_.allowances.begin(), options_.allowances.end());
    std::vector<bytes_t> budgets;
    for (auto a : allowances)
      budgets.push_back(std::max(least.budget, budget - static_cast<bytes_t>(a * static_cast<double>(budget - p.held_bytes()))));
    Form form(p, *std::min_element(budgets.begin(), budgets.end()), options_.rules, milp::longest_row(backend_), m.stop_check());
    for (std::size_t k = 0; k < budgets.size() && form.complete() && !m.stopped(); ++k) {
      if (best.found() && best.seconds() * (1 - m.limits().gap) <= r.scope_bound) break;
      form.set_budget(budgets[k]);
      const auto s = relax(form.model(), m, report);
      if (k == 0) {
        r.scope = to_string(options_.rules);
        r.scope_bound = std::max(r.scope_bound, s.bound * form.unit());
      }
      if (!s.found()) break;  // smaller budgets have no solution either, or time is up
      for (unsigned i = 1; i <= options_.thresholds && !m.stopped(); ++i)
        if (round(p, budget, form.extract(s.x, i / (options_.thresholds + 1.0)), m, best)) report("rounding");
    }
    return give(best, r);
  }

 private:
  static result give(const incumbent& best, result& r) {
    best.put_into(r);
    return r;
  }

  /// Solves the LP relaxation of `model`.
  template <class Report>
  milp::solution relax(milp::model model, const monitor& m, const Report& report) const {
    model.integer.assign(model.integer.size(), false);
    auto o = milp::options_within(m);
    o.poll = [&](double, double) { return report("relaxation"); };
    return milp::solve(backend_, model, o);
  }

  /// Offers the order of `s` to `best`; with `repair`, evicts values first until it fits.
  /// @return true if `best` took an order
  bool round(const problem& p, bytes_t budget, const schedule& s, const monitor& m, incumbent& best) const {
    const auto stop = m.stop_check();
    auto order = prune_order(p, compute_order(s));
    if (!options_.repair) return best.offer(order);
    if (measure_order(p, order).peak > budget) {
      auto fits = order::eviction(p, order).run(budget, {}, stop);
      if (!fits) return false;
      order = std::move(*fits);
    }
    const bool taken = best.offer(order);
    return best.offer(order::retain_more(p, order, budget, stop)) || taken;
  }

  options options_;
  B backend_;
};

}  // namespace remat
