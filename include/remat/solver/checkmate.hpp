// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checkmate: optimal staged rematerialization by mixed-integer programming.
#pragma once

#include <algorithm>
#include <limits>
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

    /// The restrictions R1-R3, for training graphs: rarely worse than none, and an order of magnitude faster.
    static options fast() { return {{true, true, true, {}, 0}, {}}; }
  };

  explicit checkmate(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {}
  checkmate() : checkmate(options{}) {}

  std::string name() const { return "checkmate/" + std::string(backend_.name()); }

  /// @throws bad_option if `rules.turn` is no operation; what the backend throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result best;
    double best_seconds = std::numeric_limits<double>::infinity();
    const auto offer = [&](const schedule& s) {
      try {
        const auto e = evaluate(p, s);
        if (e.peak > budget || e.seconds >= best_seconds) return;
        best_seconds = e.seconds;
        best.schedule = s;
        best.status = status::feasible;
      } catch (const bad_schedule&) {  // an answer of the backend within its tolerances, but not a schedule
      }
    };
    const auto least = bounds_without_search(p);
    if (budget < least.budget) {
      best.status = status::infeasible;
      return best;
    }
    offer(with_drops(p, needed_operations(p)));
    if (options_.start) offer(*options_.start);
    if (best_seconds * (1 - m.limits().gap) <= least.seconds) return best;
    const staged_form form(p, budget, options_.rules, [&] { return m.stopped(); });
    if (!form.complete()) return best;

    milp::options o;
    o.seconds = m.remaining();
    o.gap = m.limits().gap;
    o.threads = m.limits().threads;
    o.seed = m.limits().seed;
    if (best.found()) o.start = form.encode(best.schedule);
    if (best.found() && !o.start) o.cutoff = best_seconds / form.unit() * (1 - o.gap);
    o.poll = [&](double objective, double bound) {
      m.report({.stage = "branch and bound, " + scope() + " need " + std::to_string(bound * form.unit()) + " s or more",
                .best = std::min(best_seconds, objective * form.unit()),
                .bound = least.seconds});
      return m.stopped();
    };
    const auto s = milp::solve(backend_, form.model(), o);
    best.scope = scope();
    best.scope_bound = std::max(least.seconds, s.bound * form.unit());
    if (s.found()) offer(form.extract(s.x));
    return best;
  }

 private:
  /// The schedules that are searched, in words.
  std::string scope() const {
    const auto& r = options_.rules;
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
