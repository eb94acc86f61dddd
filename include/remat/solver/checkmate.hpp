// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checkmate: optimal staged rematerialization by mixed-integer programming. Needs Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/order/eviction.hpp>
#include <remat/staged/strong_form.hpp>

namespace remat {

/// Finds the fastest *staged* schedule by a MILP, and proves that it is the fastest.
///
/// The class of schedules and the optimum are those of the published method. The model is `staged::strong_form`, which proves the
/// optimum faster; the published model is `staged::published_form`. By default only one addition of ours takes part: the search
/// starts from the answer of a smaller model (`restricted_first`). It changes neither class nor optimum.
///
/// `result.scope_bound` bounds the time of every schedule in `result.scope`: the staged schedules within the restrictions asked
/// for. `result.scope_gap()` is the gap to this bound. In a few problems a schedule that is not staged is faster, or is the only
/// one that fits. So the status is `optimal` only if a bound on *every* schedule is met, for instance if nothing needs to be
/// recomputed; otherwise it is `feasible`. A problem without a staged schedule ends as `not_found`, with that reason and an
/// infinite `scope_bound`, never as `infeasible`.
///
/// Does not use copies to the host.
///
/// @tparam B    the MILP backend
/// @tparam Form the MILP: `staged::strong_form` or `staged::published_form`
///
/// Complexity: exponential. Seconds for some 50 operations, or for some hundred with `options::fast()`. Use `rotor` on chains:
/// their symmetry is the worst case of a MILP.
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
/// @code
/// remat::checkmate<remat::highs::backend> method({.rules = {.recompute_where_used = true}});
/// auto r = remat::solve(p, budget, method, {.seconds = 10, .gap = 0.01});
/// if (r.found()) std::cout << r.seconds << " s, at most " << 100 * r.scope_gap() << " % above the best of the " << r.scope;
/// @endcode
template <milp::backend B, class Form = staged::strong_form>
class checkmate {
 public:
  struct options {
    staged::staging rules = {};          ///< restrictions; by default all staged schedules are searched
    std::optional<schedule> start = {};  ///< a known schedule, used as a cutoff and, if staged, as the start of the search
    /// First solve with R1-R3 of `staged::staging`, unless `rules` has them all, and start from the answer. Mostly halves the
    /// time.
    bool restricted_first = true;
    /// List the operations in the order in which `start` first computes them, if there is a `start` and `rules.order` is empty.
    /// In that order, most schedules of other methods are staged.
    bool order_of_start = false;

    /// For training graphs: R1-R3, and R4 with 1 %. The schedules are rarely slower than without restrictions, and are found an
    /// order of magnitude faster. Near the smallest budgets there is often none.
    static options fast() { return {.rules = {true, true, true, {}, 0, 0.01}, .restricted_first = false}; }
    /// R2-R4 with one more stage at the end, started from R1-R4. Also finds schedules that recompute a gradient.
    static options balanced() { return {.rules = {false, true, true, {}, 0, 0.01, {}, true}, .order_of_start = true}; }
  };

  explicit checkmate(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {}
  checkmate() : checkmate(options{}) {}

  std::string name() const { return "checkmate/" + std::string(backend_.name()); }

  checkmate with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  /// @throws bad_option if `rules` are out of range; too_large if the model would be too large; any exception of the backend
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (budget < bounds_without_search(p).budget) return infeasible_result();
    return forms(*this, p, budget).solve(budget, {}, 0, m);
  }

  /// Solves for several budgets with one model, of which only the bounds of the memory rows change.
  ///
  /// Goes from the largest budget to the smallest. A bound for one budget holds for all smaller budgets. A schedule serves all
  /// budgets down to its peak, with the gap that was proven for it. For smaller budgets, evictions turn it into a start. In the
  /// end, no budget has a slower schedule than a smaller budget. Each budget gets an equal share of the time that is left.
  /// @param p       the problem
  /// @param budgets bytes, >= 0, in any order
  /// @param m       limits of the whole sweep; is told of progress
  /// @return the results in the order of `budgets`, completed and checked as by `remat::solve`
  /// @throws as `solve`; bad_option for a negative budget
  /// Complexity: that of `solve` per budget, but the model is built once.
  /// @code
  /// const remat::checkmate<remat::highs::backend> method;
  /// remat::monitor m({.seconds = 60});
  /// for (const auto& r : method.sweep(p, std::vector<remat::bytes_t>{4 << 20, 6 << 20}, m)) std::cout << r.seconds << '\n';
  /// @endcode
  std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const {
    std::vector<std::size_t> order(budgets.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](auto a, auto b) { return budgets[a] > budgets[b]; });
    std::vector<result> results(budgets.size());
    if (order.empty()) return results;
    descent falling(*this, p, budgets[order.back()], m);
    for (std::size_t k = 0; k < order.size(); ++k)
      results[order[k]] = falling.next(budgets[order[k]], static_cast<double>(order.size() - k));
    for (std::size_t k = order.size() - 1; k-- > 0;) detail::adopt(results[order[k]], results[order[k + 1]], m.limits().gap);
    return results;
  }

  /// The exact trade-off of time against memory among the schedules of the scope. Solves for `highest`, then for one byte less
  /// than the peak of the schedule found, and so on.
  /// @param p       the problem
  /// @param lowest  smallest budget, bytes
  /// @param highest largest budget, bytes
  /// @param m       limits of the whole curve; is told of progress
  /// @return results of falling budgets; each has the fastest schedule, within the gap, for all budgets from its peak to its own
  ///         budget. The list ends before `lowest`, with the first budget without a schedule, or at the limits of `m`.
  /// @throws as `sweep`
  /// Complexity: that of `solve` per schedule on the curve.
  std::vector<result> staircase(const problem& p, bytes_t lowest, bytes_t highest, monitor& m) const {
    std::vector<result> steps;
    descent falling(*this, p, std::min(lowest, highest), m);
    for (auto budget = highest; budget >= lowest && (steps.empty() || !m.stopped()); budget = steps.back().peak - 1) {
      steps.push_back(falling.next(budget, 1));
      if (!steps.back().found()) break;
    }
    return steps;
  }

 private:
  static result infeasible_result() {
    result r;
    r.status = status::infeasible;
    return r;
  }

  /// The models of one problem, for all budgets from the smallest one up.
  class forms {
   public:
    forms(const checkmate& method, const problem& p, bytes_t smallest)
        : method_(method), p_(p), smallest_(smallest), bounds_(bounds_without_search(p)) {
      rules_ = method.options_.rules;
      if (rules_.order.empty() && method.options_.order_of_start && method.options_.start)
        rules_.order = staged::first_computations(p, *method.options_.start);
      if (Form::restricts && method.options_.restricted_first &&
          !(rules_.backward_once && rules_.forward_in_one_stage && rules_.recompute_where_used)) {
        restricted_ = rules_;
        restricted_->backward_once = restricted_->forward_in_one_stage = restricted_->recompute_where_used = true;
        restricted_->extra_stages = 0;
      }
    }

    /// @param hint  another order to start from, if it fits
    /// @param floor lower bound on the time of every schedule of the scope, s
    result solve(bytes_t budget, const std::optional<std::vector<operation_id>>& hint, double floor, monitor& m) {
      result r;
      incumbent best(p_, budget);
      best.offer(needed_operations(p_));
      if (method_.options_.start) best.offer(compute_order(*method_.options_.start));
      if (hint) best.offer(*hint);
      if (restricted_) search(budget, *restricted_, restricted_form_, bounds_.seconds, m, best, r);
      search(budget, rules_, form_, std::max(floor, bounds_.seconds), m, best, r);
      if (std::isinf(r.scope_bound))
        r.reason = "proven: none of the " + r.scope + " fits";
      else if (r.reason.empty())
        r.status = status::time_limit;
      best.put_into(r);
      return r;
    }

   private:
    /// Looks for a schedule under `rules` that is faster than `best`.
    /// @param form  the model, built when it is first needed
    /// @param floor lower bound on the time of every schedule under the rules, s
    /// @param r     receives scope, proven bound and reason
    void search(bytes_t budget, const staged::staging& rules, std::optional<Form>& form, double floor, monitor& m,
                incumbent& best, result& r) {
      const auto gap = m.limits().gap;
      r.scope = to_string(rules);
      r.scope_bound = floor;
      if (best.seconds() * (1 - gap) <= floor) return;
      const auto report = [&](double objective, double bound) {
        const auto known = bound > 0 ? ", bound " + std::to_string(bound) + " s" : "";
        if (best.seconds() <= objective)
          best.report(m, r.scope + known, bounds_.seconds);
        else
          m.report({.stage = r.scope + known, .best = objective, .bound = bounds_.seconds});
        return m.stopped();
      };
      if (report(milp::infinity, floor)) return;
      if (!form) staged::require_size(method_.name(), p_);
      if (!form) form.emplace(p_, smallest_, rules, milp::longest_row(method_.backend_), m.stop_check());
      if (!form->complete()) return form.reset();
      form->set_budget(budget);
      auto o = milp::options_within(m);
      if (best.found()) o.start = form->encode(best.schedule());
      if (o.start && !milp::violation(form->model(), *o.start).empty()) o.start.reset();  // fits the budget, but breaks the rules
      if (best.found() && !o.start) o.cutoff = best.seconds() / form->unit() * (1 - gap);
      o.poll = [&](double objective, double bound) {
        return report(objective * form->unit(), std::max(floor, bound * form->unit()));
      };
      if (m.stopped()) return;
      const auto s = milp::solve(method_.backend_, form->model(), o);
      r.scope_bound = std::max(floor, s.bound * form->unit());
      const bool backend_failed = s.status == milp::status::failed || s.status == milp::status::unbounded;
      r.reason = backend_failed ? "the backend failed" : "";
      if (s.found()) best.offer(compute_order(form->extract(s.x)));
    }

    const checkmate& method_;
    const problem& p_;
    bytes_t smallest_;
    problem_bounds bounds_;
    staged::staging rules_;
    std::optional<staged::staging> restricted_;
    std::optional<Form> restricted_form_, form_;
  };

  /// Solves for one budget after another, from the largest to the smallest.
  class descent {
   public:
    descent(const checkmate& method, const problem& p, bytes_t smallest, monitor& m)
        : method_(method), p_(p), m_(m), forms_(method, p, std::max(smallest, bounds_without_search(p).budget)) {}

    /// @param budget bytes, at most that of the last call
    /// @param share  this call may take 1 / share of the time that is left
    result next(bytes_t budget, double share) {
      if (last_.found() && last_.peak <= budget) {
        last_.budget = budget;
        return last_;
      }
      std::optional<std::vector<operation_id>> hint;
      if (last_.found()) {
        const auto order = compute_order(last_.schedule);
        hint = order::eviction(p_, order).run(budget, {}, [&] { return m_.stopped(); });
      }
      last_ = budget_slice(p_, budget, method_.name(), m_, share,
                           [&](monitor& m) { return forms_.solve(budget, hint, last_.scope_bound, m); });
      return last_;
    }

   private:
    const checkmate& method_;
    const problem& p_;
    monitor& m_;
    forms forms_;
    result last_;
  };

  options options_;
  B backend_;
};

}  // namespace remat
