// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checkmate: optimal staged rematerialization by mixed-integer programming.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include <remat/core/evaluate.hpp>
#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/staged_form.hpp>

namespace remat {

/// The fastest *staged* schedule, found and proven by a MILP backend on the model of `staged_form`.
///
/// What is proven: `result.scope_bound` bounds the time of every schedule in `result.scope` (the staged ones, within the
/// restrictions asked for), and `result.scope_gap()` says how far from it the schedule is. Staged schedules are a restriction: a
/// few problems have a faster schedule outside, or only such ones. Hence the status is `optimal` only if a bound on *every*
/// schedule is met (when nothing needs to be recomputed, say), otherwise `feasible`; and a problem without a staged schedule ends
/// as `time_limit` with an infinite `scope_bound`, never as `infeasible`.
///
/// Copies to the host are not used.
///
/// @tparam B the MILP backend
///
/// Complexity: exponential; seconds for some 50 operations, and up to some hundred with `options::fast()`. Use `rotor` on chains,
/// whose symmetry is the worst case of a MILP.
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020; the model is
/// the stronger one of `staged_form`.
/// @code
/// remat::checkmate<remat::highs::backend> method({.rules = {.recompute_where_used = true}});
/// auto r = remat::solve(p, budget, method, {.seconds = 10, .gap = 0.01});
/// if (r.found()) std::cout << r.seconds << " s, at most " << 100 * r.scope_gap() << " % above the best of the " << r.scope;
/// @endcode
template <milp::backend B>
class checkmate {
 public:
  struct options {
    staging rules = {};                  ///< restrictions; by default all staged schedules are searched
    std::optional<schedule> start = {};  ///< a known schedule, used as a cutoff and, if staged, as the start of the search
    /// First solve with R1-R3, where `rules` has not all of them, and start from the answer. Mostly halves the time.
    bool restricted_first = true;

    /// R1-R3, for training graphs: rarely worse than no restriction and an order of magnitude faster, but close to the smallest
    /// budgets often without a schedule.
    static options fast() { return {{true, true, true, {}, 0}, {}, false}; }
    /// R2 and R3, started from R1-R3: also finds schedules that must recompute a gradient.
    static options balanced() { return {{false, true, true, {}, 0}, {}, true}; }
  };

  explicit checkmate(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {}
  checkmate() : checkmate(options{}) {}

  std::string name() const { return "checkmate/" + std::string(backend_.name()); }

  /// @throws bad_option if `rules.turn` is no operation; what the backend throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    const auto least = bounds_without_search(p);
    result best;
    if (budget < least.budget) {
      best.status = status::infeasible;
      return best;
    }
    offer(p, budget, with_drops(p, needed_operations(p)), best);
    if (options_.start) offer(p, budget, *options_.start, best);
    const auto& r = options_.rules;
    if (options_.restricted_first && !(r.backward_once && r.forward_in_one_stage && r.recompute_where_used))
      search(p, budget, {true, true, true, r.turn, 0}, least.seconds, m, best);
    search(p, budget, r, least.seconds, m, best);
    return best;
  }

 private:
  /// Takes `s` for the result if it is valid, within the budget and faster.
  static void offer(const problem& p, bytes_t budget, const schedule& s, result& best) {
    try {
      const auto e = evaluate(p, s);
      if (e.peak > budget || (best.found() && e.seconds >= best.seconds)) return;
      best.schedule = s;
      best.seconds = e.seconds;
      best.status = status::feasible;
    } catch (const bad_schedule&) {  // within the tolerances of the backend, but not a schedule
    }
  }

  /// Looks for a better schedule than `best` under `rules`.
  /// @param least lower bound on the time of every schedule, s
  void search(const problem& p, bytes_t budget, const staging& rules, double least, monitor& m, result& best) const {
    const auto gap = m.limits().gap;
    if (best.found() && best.seconds * (1 - gap) <= least) return;
    const staged_form form(p, budget, rules, milp::longest_row<B>(), [&] { return m.stopped(); });
    if (!form.complete()) return;
    milp::options o;
    o.seconds = m.remaining();
    o.gap = gap;
    o.threads = m.limits().threads;
    o.seed = m.limits().seed;
    if (best.found()) o.start = form.encode(best.schedule);
    if (best.found() && !o.start) o.cutoff = best.seconds / form.unit() * (1 - gap);
    const auto schedules = scope(rules);
    o.poll = [&](double objective, double bound) {
      m.report({.stage = schedules + ", bound " + std::to_string(bound * form.unit()) + " s",
                .best = std::min(best.found() ? best.seconds : milp::infinity, objective * form.unit()),
                .bound = least});
      return m.stopped();
    };
    const auto s = milp::solve(backend_, form.model(), o);
    best.scope = schedules;
    best.scope_bound = std::max(least, s.bound * form.unit());
    if (s.found()) offer(p, budget, form.extract(s.x), best);
  }

  /// The schedules that are searched, in words.
  static std::string scope(const staging& r) {
    std::string text = "staged schedules";
    if (r.extra_stages > 0) text += " with " + std::to_string(r.extra_stages) + " extra stages each";
    if (r.backward_once) text += ", backward computed once";
    if (r.forward_in_one_stage) text += ", forward in one stage";
    if (r.recompute_where_used) text += ", values recomputed where used";
    return text;
  }

  options options_;
  B backend_;
};

}  // namespace remat
