// SPDX-License-Identifier: Apache-2.0
/// @file
/// A first schedule, within a second also for 100 000 operations.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/bounds.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/recursive_checkpoints.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/twremat.hpp>
#include <remat/structure/backward_start.hpp>
#include <remat/structure/separator_tree.hpp>

namespace remat {

/// Offers orders that are made in a few passes over the problem, until one fits: store-all, `order::recursive_checkpoints` with
/// shorter and shorter runs that are kept whole, the orders of `order_by_separators` where the separators are small, evictions
/// from the leanest of them, and what takes least memory and most time: `revolve` with blocks of equal cost, and `chen` with the
/// last result alone. Of more than `few` values and operations, the finest division is tried second: where it
/// does not fit, those between are not worth their time; where it does, they may find a faster schedule.
///
/// A search that begins with them has a schedule even if it is to stop at once: a stop counts only after `grace` seconds, and not
/// at all for `few` values and operations, which take some hundredths of a second.
/// @param p    the problem
/// @param best takes the first that fits
/// @param m    is told of it
/// @return the order of the smallest peak, whether it fits or not
/// Complexity: some dozens of passes over values, edges and the computations of the orders.
/// @code
/// remat::incumbent best(p, budget);
/// remat::offer_cheap_orders(p, best, m);
/// @endcode
inline std::vector<operation_id> offer_cheap_orders(const problem& p, incumbent& best, monitor& m) {
  constexpr double grace = 0.3;
  constexpr std::size_t few = 10'000, longest = 32,  // orders: times the operations
      finest = 12,                                   // operations of an undivided part; smaller ones save next to nothing
      work = 3'000'000;                              // evictions: looks at values and operations
  const bool quick = p.values().size() + p.operations().size() <= few;
  const std::function<bool()> stop = [&] { return !quick && m.stopped() && m.elapsed() > grace; };
  const auto needed = needed_operations(p);
  auto leanest = needed;
  auto least = std::numeric_limits<bytes_t>::max();
  const auto fits = [&](const std::vector<operation_id>& order, const char* stage) {
    const auto peak = measure_order(p, order).peak;
    if (peak < least) least = peak, leanest = order;
    if (peak > best.budget() || !best.offer(order)) return false;
    best.report(m, stage);
    return true;
  };
  if (fits(needed, "store-all") || needed.empty()) return leanest;

  const auto turn = structure::backward_start(p, needed);
  const auto all = least;
  for (auto leaf = turn / 2; leaf > 0 && !stop(); leaf /= 8) {
    auto order = order::recursive_checkpoints(p, needed, turn, leaf, longest * needed.size(), stop);
    if (!order) break;
    if (fits(*order, "recursive checkpoints")) return leanest;
    if (least > all - all / 20) break;  // too much crosses the middles, of shorter runs too
  }
  const structure::separator_tree tree(p, needed, stop);
  const auto separators_fit = [&](std::size_t leaf) -> std::optional<bool> {
    auto order = order_by_separators(p, tree, leaf, longest * needed.size(), stop);
    if (!order) return std::nullopt;  // smaller ones are longer still
    return fits(*order, "separators");
  };
  bool finest_known = quick;
  for (auto leaf = needed.size() / 2; leaf > 0 && !stop(); leaf /= 4) {
    if (leaf < needed.size() / 2 && !std::exchange(finest_known, true) && !separators_fit(finest).value_or(true)) break;
    const auto found = separators_fit(leaf);
    if (!found) break;
    if (*found) return leanest;
    if (!quick && leaf <= finest) break;
  }
  if (best.found() || stop()) return leanest;
  for (const auto& start : {needed, leanest})
    if (auto order = order::eviction(p, start).run(best.budget(), {.work = work}, stop); order && !stop())
      if (fits(*order, "evictions")) return leanest;
  if (stop() || best.budget() < bounds_without_search(p).budget) return leanest;
  const auto fits_by = [&](const auto& method) {
    monitor some(m, 0.5, [](const progress&) { return control::go_on; });
    const auto r = method.solve(p, best.budget(), some);
    return r.found() && fits(compute_order(r.schedule), "least memory");
  };
  if (!fits_by(revolve({.links = 1}))) fits_by(chen({.variant = chen::variant::last_node}));
  return leanest;
}

}  // namespace remat
