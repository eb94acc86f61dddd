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

/// Recomputation and copies to the host together, by POET's MILP: Checkmate's stages, with columns for what is on the host and
/// for copies in either direction (`staged::strong_form` with copies).
///
/// Where the published program minimises energy under a limit of the time of computations, and copies take no time, this one
/// minimises time: computations and both directions of the link go on beside one another, what comes in is there before it is
/// read or dropped, and what is absent has left. Copies may be cut into parts there. `copies::lay_copies` lays whole ones over
/// the order of the solution, with what it moves and with all values, and `evaluate` says what that takes.
///
/// So `result.scope_bound` holds for every schedule of `result.scope`, which are the staged ones whose copies to the device come
/// first in their stage (`strong_form` has the small print), and is infinite if there is none; the schedule may be slower than
/// that, and, as copies are laid without regard to stages, faster. The status is `optimal` only if a bound on every schedule is
/// met; `bound::copy_bound` is proven besides. A problem that allows no copies is `not_applicable`, unless store-all fits.
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
    std::optional<schedule> start = {};            ///< a known schedule, used as a cutoff; of its copies nothing is taken
  };

  explicit poet(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {}
  poet() : poet(options{}) {}

  std::string name() const { return "poet/" + std::string(backend_.name()); }

  poet with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  /// @throws bad_option if `rules` are out of range; too_large; what the backend throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    const auto needed = needed_operations(p);
    if (incumbent all(p, budget); all.offer(needed)) {
      all.put_into(r);
      return r;
    }
    if (!p.copies()) {
      r.status = status::not_applicable;
      r.reason = copies::no_copies;
      return r;
    }
    prove_bound(p, budget, r, [&] { return m.stopped(); });
    copies::copy_incumbent best(p, budget);
    best.offer({needed});
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
    const staged::strong_form form(
        p, budget, options_.rules, milp::longest_row(backend_), [&] { return m.stopped(); }, true);
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
