// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recomputation and copies to the host by mixed-integer programming, for small graphs. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include <remat/copies/copy_search.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/prove_bound.hpp>
#include <remat/staged/strong_form.hpp>

namespace remat {

/// Plans recomputation and copies to the host together by POET's MILP: Checkmate's stages, with columns for values on the host
/// and for copies in either direction (`staged::strong_form` with copies).
///
/// The published program minimises energy under a limit on the time of computations, and its copies take no time. This program
/// minimises time: computations and both directions of the link overlap. A value has arrived before it is read or dropped, and
/// has left before it is absent. The program may cut copies into parts. `copies::schedule_copies` lays whole copies over the
/// order of its solution, once for the values that the solution moves and once for all values. `evaluate` gives the time.
///
/// `result.scope_bound` holds for every schedule of `result.scope`: the staged schedules whose copies to the device come first in
/// their stage (details in `strong_form`). It is infinite if there is none. The schedule found may be slower than this bound, and
/// also faster, because copies are laid without regard to stages. The status is `optimal` only if a bound on every schedule is
/// met; `bound::copy_bound` is proven as well. A problem without copies is `not_applicable`, unless store-all fits.
///
/// @tparam B the MILP backend
///
/// Complexity: exponential; seconds for some 20 operations.
///
/// Reference: Patil et al., "POET: Training Neural Networks on Tiny Devices with Integrated Rematerialization and Paging", ICML
/// 2022.
/// @code
/// auto r = remat::solve(p, budget, remat::poet<remat::highs::backend>{}, {.seconds = 10});
/// @endcode
template <milp::backend B>
class poet {
 public:
  struct options {
    staged::staging rules = {.last_stage = true};  ///< restrictions
    std::optional<schedule> start = {};            ///< a known schedule, used as a cutoff; its copies are ignored
  };

  explicit poet(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {}
  poet() : poet(options{}) {}

  std::string name() const { return "poet/" + std::string(backend_.name()); }

  poet with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  /// @throws bad_option if `rules` are out of range; too_large if the model would be too large; any exception of the backend
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (auto all = store_all_if_it_fits(p, budget)) return *std::move(all);
    if (!p.copies()) return refused(copies::no_copies);
    result r;
    prove_bound(p, budget, r, m.stop_check());
    copies::copy_incumbent best(p, budget);
    best.offer({needed_operations(p)});
    if (options_.start) best.offer({compute_order(*options_.start)});
    search(p, budget, best, r, m);
    best.put_into(r);
    return r;
  }

 private:
  void search(const problem& p, bytes_t budget, copies::copy_incumbent& best, result& r, monitor& m) const {
    r.scope = to_string(options_.rules) + ", copies to the device first in a stage";
    r.scope_bound = r.bound;
    const auto done = [&] { return best.seconds() * (1 - m.limits().gap) <= r.scope_bound; };
    best.report(m, r.scope, r.bound);
    if (done() || m.stopped()) return;
    staged::require_size(name(), p);
    const staged::strong_form form(p, budget, options_.rules, milp::longest_row(backend_), m.stop_check(), true);
    if (!form.complete()) return;
    auto o = milp::options_within(m);
    if (best.seconds() < milp::infinity) o.cutoff = best.seconds() / form.unit();
    o.poll = [&](double, double bound) {
      const double proven = std::max(r.scope_bound, bound * form.unit());
      best.report(m, r.scope + (proven > 0 ? ", bound " + std::to_string(proven) + " s" : ""), r.bound);
      return m.stopped();
    };
    const auto s = milp::solve(backend_, form.model(), o);
    r.scope_bound = std::max(r.scope_bound, s.bound * form.unit());
    if (s.status == milp::status::failed || s.status == milp::status::unbounded) r.reason = "the backend failed";
    if (std::isinf(r.scope_bound)) r.reason = "proven: none of the " + r.scope + " fits";
    if (!s.found()) return;
    const auto [order, moved] = form.extract_copied(s.x);
    best.offer({order, copies::departures_of(moved)});
    best.offer({order});
    best.report(m, r.scope, r.bound);
  }

  options options_;
  B backend_;
};

}  // namespace remat
