// SPDX-License-Identifier: Apache-2.0
/// @file
/// Finds a first schedule, within a second even for 100 000 operations.
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

/// Offers orders that take a few passes over the problem each, until one fits the budget:
/// - store-all;
/// - `order::recursive_checkpoints`, with ever shorter runs that are kept whole;
/// - `order_by_separators`, if the separators are small;
/// - evictions from store-all and from the order with the smallest peak so far;
/// - orders of least memory and most time: `revolve` with blocks of equal cost, and `chen` with the last result alone.
///
/// In a problem of more than `max_quick_size` values and operations, the finest division by separators is tried second. If it
/// does not fit, the divisions between are skipped. If it fits, they may still give a faster schedule.
///
/// A search that begins with these orders has a schedule even if it must stop at once. A stop counts only after `grace_seconds`.
/// Problems of at most `max_quick_size` values and operations take some hundredths of a second; of their orders, a stop ends only
/// those of least memory.
/// @param p    the problem
/// @param best receives each order that fits
/// @param m    limits and stop; is told of each improvement
/// @return the order with the smallest peak, whether it fits or not
/// Complexity: some dozens of passes over the values, the edges and the computations of the orders.
/// @code
/// remat::incumbent best(p, budget);
/// remat::offer_cheap_orders(p, best, m);
/// @endcode
inline std::vector<operation_id> offer_cheap_orders(const problem& p, incumbent& best, monitor& m) {
  constexpr double grace_seconds = 0.3;
  constexpr std::size_t max_quick_size = 10'000, max_repetitions = 32,  // most computations of an order, times the operations
      finest_leaf = 12,               // operations of an undivided part; smaller parts save next to nothing
      max_eviction_work = 3'000'000;  // of an eviction: values and operations looked at
  const bool quick = p.values().size() + p.operations().size() <= max_quick_size;
  const std::function<bool()> stop = [&] { return !quick && m.stopped() && m.elapsed() > grace_seconds; };
  const auto needed = needed_operations(p);
  auto leanest = needed;
  auto least_peak = std::numeric_limits<bytes_t>::max();
  const auto offer = [&](const std::vector<operation_id>& order, const char* stage) {
    const auto peak = measure_order(p, order).peak;
    if (peak < least_peak) least_peak = peak, leanest = order;
    if (peak > best.budget() || !best.offer(order)) return false;
    best.report(m, stage);
    return true;
  };
  if (offer(needed, "store-all") || needed.empty()) return leanest;

  const auto backward_start = structure::backward_start(p, needed);
  const auto store_all_peak = least_peak;
  for (auto leaf = backward_start / 2; leaf > 0 && !stop(); leaf /= 8) {
    auto order = order::recursive_checkpoints(p, needed, backward_start, leaf, max_repetitions * needed.size(), stop);
    if (!order) break;
    if (offer(*order, "recursive checkpoints")) return leanest;
    if (least_peak > store_all_peak - store_all_peak / 20) break;  // too many bytes cross the middle; shorter runs do not help
  }
  const structure::separator_tree tree(p, needed, stop);
  const auto offer_separators = [&](std::size_t leaf) -> std::optional<bool> {
    auto order = order_by_separators(p, tree, leaf, max_repetitions * needed.size(), stop);
    if (!order) return std::nullopt;  // smaller parts give longer orders
    return offer(*order, "separators");
  };
  bool finest_tried = quick;
  for (auto leaf = needed.size() / 2; leaf > 0 && !stop(); leaf /= 4) {
    if (leaf < needed.size() / 2 && !std::exchange(finest_tried, true) && !offer_separators(finest_leaf).value_or(true)) break;
    const auto found = offer_separators(leaf);
    if (!found) break;
    if (*found) return leanest;
    if (!quick && leaf <= finest_leaf) break;
  }
  if (best.found() || stop()) return leanest;
  for (const auto& start : {needed, leanest})
    if (auto order = order::eviction(p, start).run(best.budget(), {.work = max_eviction_work}, stop); order && !stop())
      if (offer(*order, "evictions")) return leanest;
  if (stop() || best.budget() < bounds_without_search(p).budget) return leanest;
  const auto offer_by = [&](const auto& method) {
    monitor share(m, 0.5, [](const progress&) { return control::go_on; });
    const auto r = method.solve(p, best.budget(), share);
    return r.found() && offer(compute_order(r.schedule), "least memory");
  };
  if (!offer_by(revolve({.links = 1}))) offer_by(chen({.variant = chen::variant::last_node}));
  return leanest;
}

}  // namespace remat
