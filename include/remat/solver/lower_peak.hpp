// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lowers the peak of an order step by step. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <remat/bound/memory_bound.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/order/destroy_repair.hpp>
#include <remat/order/replay.hpp>

namespace remat {

namespace detail {

/// Sets of values to keep across a run of `last`, within `room` bytes besides its working set, by their bytes, the largest first.
/// They are minimum cuts at falling prices of time, and mixtures of neighbouring cuts.
/// @param cut   the network of `p`
/// @param made  per value: may be kept
/// @param large bytes; operations with at least this working set must not run again after `last`
/// @throws bound::interrupted if `cut` is stopped
inline std::map<bytes_t, std::vector<bool>, std::greater<>> sets_kept_across(const problem& p, bound::last_run_cut& cut,
                                                                             operation_id last, bytes_t room,
                                                                             const std::vector<bool>& made, bytes_t large) {
  constexpr std::size_t max_sets = 8, mixtures = 24;
  const auto& ops = p.operations();
  std::map<bytes_t, std::vector<bool>, std::greater<>> sets;
  const auto add = [&](const std::vector<bool>& kept) {
    bytes_t bytes = 0;
    for (value_id v = 0; v < kept.size(); ++v)
      if (kept[v] && !p.values()[v].held) bytes += p.values()[v].bytes;
    if (bytes <= room) sets.try_emplace(bytes, kept);
    if (sets.size() > max_sets) sets.erase(std::prev(sets.end()));
  };
  std::vector<bool> rich;
  for (int i = 0; i <= 90; ++i) {
    const double worth = i < 90 ? 50 * std::pow(1.1, -i) : 0;  // price of all seconds together, in units of room + working set
    std::vector<bytes_t> prices(ops.size(), bound::last_run_cut::forbidden);
    const auto all = std::min(worth * static_cast<double>(room + cut.working_set(last)),
                              static_cast<double>(bound::last_run_cut::max_price) * (1 - 1e-9));
    const auto price = all / (p.total_seconds() + 1e-30);
    for (operation_id o = 0; o < ops.size(); ++o)
      if (cut.working_set(o) < large) prices[o] = static_cast<bytes_t>(price * ops[o].seconds);
    auto lean = cut.values_to_keep_across(last, made, prices);
    if (lean == rich) continue;
    add(lean);
    for (std::size_t part = 1; !rich.empty() && part < mixtures; ++part)
      for (const bool first : {true, false}) {  // lean for the outputs of the first operations, or of the others
        auto mixed = rich;
        for (value_id v = 0; v < mixed.size(); ++v)
          if (!p.is_source(v) && (p.producer(v) < ops.size() * part / mixtures) == first) mixed[v] = lean[v];
        add(mixed);
      }
    rich = std::move(lean);
  }
  return sets;
}

/// Changes an order so that only `kept`, and the inputs and outputs of the computation at `position`, stay across this
/// computation. Other values computed earlier are dropped: they are recomputed when they are read, and targets one after the
/// other at the end.
/// @return nothing if a once-only operation would have to run again
inline std::optional<std::vector<operation_id>> defer_across(const problem& p, const std::vector<operation_id>& order,
                                                             std::size_t position, std::vector<bool> kept) {
  order::order_builder builder(p);
  const auto& op = p.operations()[order[position]];
  for (const auto* used : {&op.inputs, &op.outputs})
    for (auto v : *used) kept[v] = true;
  const auto drop = [&](bool targets) {
    for (value_id v = 0; v < kept.size(); ++v)
      if (!kept[v] && (targets || !p.is_target(v))) builder.drop(v);
  };
  for (std::size_t k = 0; k < order.size(); ++k) {
    if (k == position) drop(true);
    const auto& outputs = p.operations()[order[k]].outputs;
    const bool useless =
        k > position && std::all_of(outputs.begin(), outputs.end(), [&](value_id v) { return builder.on_device(v); });
    if (!useless && !builder.run(order[k])) return std::nullopt;
  }
  for (auto v : p.targets()) {
    if (builder.on_device(v)) continue;
    drop(false);
    if (!builder.compute_values(std::vector{v})) return std::nullopt;
  }
  return builder.finish();
}

}  // namespace detail

/// Lowers the peak of an order, by at most 2 % per step, until it fits the budget.
///
/// Each step looks at the last computation that exceeds the aim of the step. A minimum cut, or a mixture of two, chooses what to
/// keep across it. All other values are computed later, even targets that the order had already. `destroy_repair` then makes the
/// order fit the aim. If no step succeeds, the search begins again with other choices first.
/// @param p      the problem
/// @param start  a valid order
/// @param budget bytes
/// @param stop   polled within cuts and repairs; true gives up
/// @return an order within the budget, or nothing
/// Complexity: per step at most 300 maximum flows on O(values + operations) vertices, and 64 repairs.
inline std::optional<std::vector<operation_id>> lower_peak(const problem& p, const std::vector<operation_id>& start,
                                                           bytes_t budget, const std::function<bool()>& stop = {}) {
  constexpr std::array parts{1.0, 0.7, 0.4, 1e6};  // of the working set at the peak; larger operations do not run after it
  try {
    bound::last_run_cut cut(p, stop);
    const auto part_of = [](double part, bytes_t bytes) {
      return static_cast<bytes_t>(std::min(part * static_cast<double>(bytes), static_cast<double>(max_peak)));
    };
    const auto lower_once = [&](const std::vector<operation_id>& order, const std::vector<bytes_t>& memory, bytes_t aim,
                                std::size_t first) -> std::optional<std::vector<operation_id>> {
      const auto last_over = std::find_if(memory.rbegin(), memory.rend(), [&](bytes_t b) { return b > aim; });
      if (last_over == memory.rend()) return std::nullopt;  // the sources alone exceed the aim
      const auto position = static_cast<std::size_t>(std::distance(last_over, memory.rend())) - 1;
      std::vector<bool> made(p.values().size());
      for (value_id v = 0; v < made.size(); ++v) made[v] = p.is_source(v);
      for (std::size_t k = 0; k < position; ++k)
        for (auto v : p.operations()[order[k]].outputs) made[v] = true;
      const auto working_set = cut.working_set(order[position]);
      order::destroy_repair candidate(p, aim, first);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto large = p.held_bytes() + part_of(parts[(first + i) % parts.size()], working_set - p.held_bytes());
        for (const auto& [bytes, kept] : detail::sets_kept_across(p, cut, order[position], aim - working_set, made, large))
          if (const auto later = detail::defer_across(p, order, position, kept))
            for (const double spread : {0.0, 1.0}) {
              if (stop && stop()) return std::nullopt;
              candidate.load(*later);
              std::size_t drops = 0;
              if (candidate.repair(spread, std::numeric_limits<double>::infinity(),
                                   [&] { return drops++ > 200 + p.operations().size() / 8 || (stop && stop()); }))
                return candidate.order();
            }
      }
      return std::nullopt;
    };
    double widest = 0.02;  // largest step from `start`, as a part of the peak
    for (std::size_t first = 0; first < parts.size(); ++first) {
      std::optional<std::vector<operation_id>> order;
      for (double step = widest; step > 0.002 && !(stop && stop());) {
        const auto measured = measure_order(p, order.value_or(start));
        if (measured.peak <= budget) return order.value_or(start);
        auto next = lower_once(order.value_or(start), measured.memory, std::max(budget, part_of(1 - step, measured.peak)), first);
        if (next)
          order = std::move(next);
        else
          step /= 2;
        if (!order) widest = step;
      }
    }
  } catch (const bound::interrupted&) {  // stopped within a cut
  }
  return std::nullopt;
}

}  // namespace remat
