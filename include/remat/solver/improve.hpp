// SPDX-License-Identifier: Apache-2.0
/// @file
/// An anytime improver for schedules of any origin: large-neighbourhood search on orders of computations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/neighbourhood.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// When `improve` ends, and what it works on.
struct improve_options {
  std::size_t patience = 20000;  ///< rounds without an improvement after which it ends, >= 1
  std::uint64_t stream = 0;      ///< searches with the same seed and another stream make other choices
  double slack = 0.003;          ///< orders up to this part slower than the best are worked on too, >= 0

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (patience < 1) throw bad_option("improve_options.patience must be >= 1, got 0");
    if (!(slack >= 0 && slack < std::numeric_limits<double>::infinity()))
      throw bad_option("improve_options.slack must be a finite number >= 0, got " + std::to_string(slack));
  }
};

/// Makes a known order faster, or one that does not fit the budget fit.
///
/// Each round takes some recomputations out of an order (those in a window, those of neighbouring operations, or any), moves some
/// computations, drops values across the positions that need too much where that costs least, and retains what then can be; the
/// `neighbourhood` does that. An order is worked on further if it is faster than the last, or nearly as fast as the best
/// (record-to-record travel). Equal seeds give equal results where no limit cuts the search off.
///
/// @param p     the problem
/// @param order a valid order of computations, of any memory need; it is made to fit where it does not
/// @param best  the fastest known, which is improved
/// @param m     seed, limits and stop; is told of each improvement
/// @param o     when to end
/// @param bound a lower bound on the time of every schedule, s: reported, and the search ends when it is met
/// @throws bad_option for options out of range
/// Complexity: O(values + edges executed) for each of the few drops of a round; thousands of rounds per second for some 150
/// operations, some ten for thousands.
///
/// Reference: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998 (large
/// neighbourhoods); Dueck, "New optimization heuristics", J. Comput. Phys. 104, 1993 (record-to-record travel).
inline void improve(const problem& p, std::vector<index_t> order, incumbent& best, monitor& m, const improve_options& o = {},
                    double bound = 0) {
  o.validate();
  const auto stop = [&] { return m.stopped(); };
  const auto done = [&] { return best.found() && best.seconds() * (1 - m.limits().gap) <= bound; };
  const auto report = [&] { m.report({.stage = "improvement", .best = best.seconds(), .bound = bound}); };
  std::mt19937_64 random(m.limits().seed + (o.stream << 32));
  neighbourhood n(p, best.budget(), random());
  n.load(order);
  n.repair(0, std::numeric_limits<double>::infinity(), stop);
  auto current = order;
  auto least = n.peak();
  for (std::size_t idle = 0; !best.found() && !n.fits() && idle < o.patience && !stop(); ++idle) {  // first make one fit
    n.load(idle % 2 == 0 ? order : current);
    for (auto shifts = random() % 8; shifts > 0; --shifts) n.shift();
    n.ruin();
    n.repair(static_cast<double>(random() % 1024) / 128, std::numeric_limits<double>::infinity(), stop);
    if (n.peak() < least) idle = 0;
    if (n.peak() <= least) current = n.order(), least = n.peak();
  }
  if (n.fits()) {
    n.retain();
    if (best.offer(n.order())) report();
  }
  if (!best.found()) return;
  current = best.order();
  double seconds = best.seconds();
  for (std::size_t idle = 0; idle < o.patience && !done() && !stop(); ++idle) {
    if (random() % 2000 == 0) current = best.order(), seconds = best.seconds();
    n.load(current);
    for (auto shifts = random() % 3; shifts > 0; --shifts) n.shift();
    n.ruin();
    const double spread = static_cast<double>(random() % 1024) / 1024;
    const double slack = o.slack * static_cast<double>(random() % 1024) / 1024;
    if (!n.repair(spread, 1.1 * seconds, stop)) continue;
    n.retain();
    if (n.seconds() <= seconds || n.seconds() <= best.seconds() * (1 + slack)) current = n.order(), seconds = n.seconds();
    if (n.seconds() < best.seconds() * (1 - 1e-12) && best.offer(n.order())) {
      idle = 0;
      report();
    }
  }
}

/// Any solver, its schedule improved until the limits are reached: a solver made anytime. If Inner finds nothing, a schedule is
/// looked for all the same.
///
/// @tparam Inner the solver that is improved; its bounds are kept
///
/// Copies to the host are not used.
/// @code
/// remat::improved<remat::rotor> method;
/// auto r = remat::solve(p, budget, method, {.seconds = 10, .seed = 7}, [](const remat::progress& now) { show(now.best); });
/// @endcode
template <solver Inner>
class improved {
 public:
  struct options {
    improve_options search = {};
    double share = 0.5;  ///< part of the time that Inner may take, in (0, 1]
  };

  explicit improved(Inner inner = Inner()) : improved(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  improved(Inner inner, const options& o) : inner_(std::move(inner)), options_(o) {
    o.search.validate();
    if (!(o.share > 0 && o.share <= 1)) throw bad_option("improved.share must be in (0, 1], got " + std::to_string(o.share));
  }

  std::string name() const { return "improved/" + std::string(inner_.name()); }

  /// @throws what Inner throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    monitor first(m, options_.share);
    auto r = inner_.solve(p, budget, first);
    if (r.status == status::infeasible) return r;
    const bool copies = r.found() && has_copies(r.schedule);
    incumbent best(p, budget);
    best.offer(needed_operations(p));
    if (r.found() && !copies) best.offer(compute_order(r.schedule));
    improve(p, best.found() ? best.order() : needed_operations(p), best, m, options_.search,
            std::max(r.bound, bounds_without_search(p).seconds));
    if (copies && best.found() && evaluate(p, r.schedule).seconds <= best.seconds()) return r;
    best.put_into(r);
    return r;
  }

 private:
  static bool has_copies(const schedule& s) {
    return std::any_of(s.steps.begin(), s.steps.end(),
                       [](const step& x) { return x.what == action::offload || x.what == action::prefetch; });
  }

  Inner inner_;
  options options_;
};

}  // namespace remat
