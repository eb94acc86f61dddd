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

/// When `local_search` ends, and what it works on.
struct local_search_options {
  std::size_t patience = 20000;  ///< rounds without an improvement after which it ends, >= 1
  std::uint64_t stream = 0;      ///< searches with the same seed and another stream make other choices
  /// Orders up to this part slower than the best are worked on too, >= 0; above 400 operations in proportion less.
  double slack = 0.003;

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (patience < 1) throw bad_option("local_search_options.patience must be >= 1, got 0");
    if (!(slack >= 0 && slack < std::numeric_limits<double>::infinity()))
      throw bad_option("local_search_options.slack must be a finite number >= 0, got " + std::to_string(slack));
  }
};

/// Patience that costs much the same in problems of any size: `rounds` / operations, at least 20, at most 20 per operation.
inline std::size_t patience_for(const problem& p, std::size_t rounds) {
  const auto operations = std::max<std::size_t>(1, p.operations().size());
  return std::clamp<std::size_t>(rounds / operations, 20, 20 * operations);
}

/// Makes a known order faster, or one that does not fit the budget fit.
///
/// Each round takes some recomputations out of an order (those in a window, those of neighbouring operations, or any), moves some
/// computations, drops values across the positions that need too much where that costs least, and retains what then can be; the
/// `destroy_repair` does that. An order is worked on further if it is faster than the last, or nearly as fast as the best
/// (record-to-record travel). Equal seeds give equal results where no limit cuts the search off.
///
/// @param p     the problem
/// @param order a valid order of computations, of any memory need; it is made to fit where it does not
/// @param best  the fastest known, which is improved
/// @param m     seed, limits and stop; is told of each improvement
/// @param o     when to end
/// @param bound a lower bound on the time of every schedule, s: reported, and the search ends when it is met
/// @throws bad_option for options out of range
/// Complexity: O(values + closures of what is dropped) for each of the few drops of a round; thousands of rounds per second for
/// some 150 operations, some hundreds for thousands.
///
/// Reference: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998 (large
/// neighbourhoods); Dueck, "New optimization heuristics", J. Comput. Phys. 104, 1993 (record-to-record travel).
inline void local_search(const problem& p, std::vector<operation_id> order, incumbent& best, monitor& m,
                         const local_search_options& o = {}, double bound = 0) {
  o.validate();
  const auto never = std::numeric_limits<double>::infinity();
  const auto stop = [&] { return m.stopped(); };
  const auto done = [&] { return best.found() && best.seconds() * (1 - m.limits().gap) <= bound; };
  std::mt19937_64 random(m.limits().seed + (o.stream << 32));
  destroy_repair n(p, best.budget(), random());
  std::vector<operation_id> faster;  // than the best, not offered yet
  const auto offer = [&] {
    if (!faster.empty() && best.offer(faster)) best.report(m, "improvement", bound);
    faster.clear();
  };
  n.load(order);
  n.repair(0, never, stop);
  auto current = order;
  auto least = n.peak();
  for (std::size_t idle = 0; !best.found() && !n.fits() && idle < o.patience && !stop(); ++idle) {  // first make one fit
    n.load(idle % 2 == 0 ? order : current);
    for (auto shifts = random() % 8; shifts > 0; --shifts) n.shift();
    n.ruin();
    n.repair(static_cast<double>(random() % 1024) / 128, never, stop);
    if (n.peak() < least) idle = 0;
    if (n.peak() <= least) current = n.order(), least = n.peak();
  }
  if (n.fits()) {
    n.retain(false, stop);
    faster = n.order();
    offer();
  }
  if (!best.found()) return;
  n.load(best.order());
  double seconds = n.seconds(), lowest = seconds;  // of what is worked on, and of the fastest seen
  const double slack = o.slack * std::min(1.0, 400.0 / static_cast<double>(order.size() + 1));
  for (std::size_t idle = 0, rounds = 1; idle < o.patience && !done() && !stop(); ++idle, ++rounds) {
    if (random() % 2000 == 0) {
      offer();
      n.load(best.order());
      seconds = n.seconds();
    }
    for (auto shifts = random() % 3; shifts > 0; --shifts) n.shift();
    n.ruin();
    const double spread = static_cast<double>(random() % 1024) / 1024;
    const double most = std::max(seconds, lowest * (1 + slack * static_cast<double>(random() % 1024) / 1024));
    if (!n.repair(spread, most + (seconds - n.seconds()), stop)) {
      n.roll_back();
      continue;
    }
    n.retain(false, stop);
    if (n.seconds() > most) {
      n.roll_back();
      continue;
    }
    n.commit();
    seconds = n.seconds();
    if (seconds < lowest * (1 - 1e-12)) lowest = seconds, faster = n.order(), idle = 0;
    if (rounds % (1 + order.size() / 200) == 0) offer();
  }
  offer();
}

}  // namespace remat::order
