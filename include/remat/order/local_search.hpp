// SPDX-License-Identifier: Apache-2.0
/// @file
/// Large-neighbourhood search around an order of computations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/order/destroy_repair.hpp>

namespace remat::order {

/// Stopping rule of `local_search`.
struct local_search_options {
  std::size_t patience = 20000;  ///< rounds without an improvement after which the search ends, >= 1
  std::uint64_t stream = 0;      ///< searches with equal seeds and different streams make different choices

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (patience < 1) throw bad_option("local_search_options.patience must be >= 1, got 0");
  }
};

/// Patience that costs about the same for problems of any size: `rounds` / operations, at least 20, at most 20 per operation.
inline std::size_t patience_for(const problem& p, std::size_t rounds) {
  const auto operations = std::max<std::size_t>(1, p.operations().size());
  return std::clamp<std::size_t>(rounds / operations, 20, 20 * operations);
}

/// Makes an order faster, or makes an order fit the budget.
///
/// Each round destroys and repairs an order (`destroy_repair`). It removes some recomputations and moves some computations. It
/// drops values where the order exceeds the budget and the drops cost least. Then it retains values where there is room. The
/// search continues from the new order if that is faster than the last order, or nearly as fast as the best (record-to-record
/// travel). Equal seeds give equal results unless a limit cuts the search off.
///
/// @param p     the problem
/// @param order a valid order of computations, which may exceed the budget
/// @param best  fastest order so far; receives improvements
/// @param m     seed, limits and stop; each improvement is reported to it
/// @param o     stopping rule
/// @param bound a lower bound on the time of every schedule, s; it is reported, and the search ends when `best` meets it
/// @throws bad_option for options out of range
/// Complexity: O(values + recomputation closures of the dropped values) for each of the few drops of a round. That is thousands
/// of rounds per second for 150 operations, and hundreds for thousands of operations.
///
/// Reference: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998 (large
/// neighbourhoods); Dueck, "New optimization heuristics", J. Comput. Phys. 104, 1993 (record-to-record travel).
inline void local_search(const problem& p, std::vector<operation_id> order, incumbent& best, monitor& m,
                         const local_search_options& o = {}, double bound = 0) {
  o.validate();
  const auto never = std::numeric_limits<double>::infinity();
  const auto stop = m.stop_check();
  const auto done = [&] { return best.found() && best.seconds() * (1 - m.limits().gap) <= bound; };
  std::mt19937_64 random(m.limits().seed + (o.stream << 32));
  destroy_repair candidate(p, best.budget(), random());
  std::vector<operation_id> improvement;  // faster than the best, not offered yet
  const auto offer = [&] {
    if (!improvement.empty() && best.offer(improvement)) best.report(m, "improvement", bound);
    improvement.clear();
  };
  candidate.load(order);
  candidate.repair(0, never, stop);
  auto current = order;
  auto least_peak = candidate.peak();
  for (std::size_t idle = 0; !best.found() && !candidate.fits() && idle < o.patience && !stop();
       ++idle) {  // first make an order fit
    candidate.load(idle % 2 == 0 ? order : current);
    for (auto shifts = random() % 8; shifts > 0; --shifts) candidate.shift();
    candidate.destroy();
    candidate.repair(static_cast<double>(random() % 1024) / 128, never, stop);
    if (candidate.peak() < least_peak) idle = 0;
    if (candidate.peak() <= least_peak) current = candidate.order(), least_peak = candidate.peak();
  }
  if (candidate.fits()) {
    candidate.retain(false, stop);
    improvement = candidate.order();
    offer();
  }
  if (!best.found()) return;
  candidate.load(best.order());
  double current_seconds = candidate.seconds(),
         best_seconds = current_seconds;  // of the current order, and of the fastest one seen
  // The search continues from orders slower than the best by up to this fraction.
  const double slack = 0.003 * std::min(1.0, 400.0 / static_cast<double>(order.size() + 1));
  for (std::size_t idle = 0, rounds = 1; idle < o.patience && !done() && !stop(); ++idle, ++rounds) {
    if (random() % 2000 == 0) {
      offer();
      candidate.load(best.order());
      current_seconds = candidate.seconds();
    }
    for (auto shifts = random() % 3; shifts > 0; --shifts) candidate.shift();
    candidate.destroy();
    const double spread = static_cast<double>(random() % 1024) / 1024;
    const double limit = std::max(current_seconds, best_seconds * (1 + slack * static_cast<double>(random() % 1024) / 1024));
    if (!candidate.repair(spread, limit + (current_seconds - candidate.seconds()), stop)) {
      candidate.roll_back();
      continue;
    }
    candidate.retain(false, stop);
    if (candidate.seconds() > limit) {
      candidate.roll_back();
      continue;
    }
    candidate.commit();
    current_seconds = candidate.seconds();
    if (current_seconds < best_seconds * (1 - 1e-12)) best_seconds = current_seconds, improvement = candidate.order(), idle = 0;
    if (rounds % (1 + order.size() / 200) == 0) offer();
  }
  offer();
}

}  // namespace remat::order
