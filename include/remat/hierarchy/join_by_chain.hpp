// SPDX-License-Identifier: Apache-2.0
/// @file
/// Joins parts by dynamic programming over their chain.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/persistent_table.hpp>
#include <remat/core/liveness.hpp>
#include <remat/hierarchy/level.hpp>
#include <remat/hierarchy/part_chain.hpp>
#include <remat/order/eviction.hpp>

namespace remat {

/// The top level of Rockmate. The parts are the links of a chain (`part_chain`). The dynamic program of rotor
/// (`persistent_table`) chooses an option for each part, or recomputes the part. The chain overestimates memory, so schedules
/// for other budgets of the table are measured, too. The fastest schedule that fits is taken.
///
/// Complexity: that of `persistent_table`.
///
/// Reference: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
/// re-materialization in PyTorch", ICML 2023.
class join_by_chain {
 public:
  struct options {
    std::size_t slots = 1000;           ///< slots of `persistent_table`, >= 1
    std::size_t budgets = 48;           ///< smaller budgets of the table to try, >= 1, down to a third of the largest budget
    std::size_t budgets_of_parts = 12;  ///< the same for a part that is joined from its own parts, >= 1
    bool evictions = false;             ///< `eviction` repairs orders that do not fit; not in the paper
  };

  join_by_chain() : join_by_chain(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit join_by_chain(const options& o) : options_(o) {
    if (o.slots < 1) throw bad_option("join_by_chain.slots must be >= 1, got 0");
    if (o.budgets < 1) throw bad_option("join_by_chain.budgets must be >= 1, got 0");
    if (o.budgets_of_parts < 1) throw bad_option("join_by_chain.budgets_of_parts must be >= 1, got 0");
  }

  std::string name() const { return "chain"; }

  void join(hierarchy::level& l, monitor& m) const {
    if (l.parts.size() < 2) return;
    const auto stop = m.stop_check();
    const hierarchy::part_chain parts(l.p, l.index, l.parts, l.options);
    const auto table_budget = std::max<bytes_t>(0, l.budget() - parts.unmodelled_bytes()) + (l.budget() - l.p.held_bytes()) / 3;
    const chain::persistent_table table(parts.model(), table_budget, {.slots = options_.slots, .stop = stop});
    if (!table.complete()) return;
    std::vector<std::vector<operation_id>> over_budget;
    std::vector<chain::chain_step> before;
    const auto tries = l.whole_problem ? options_.budgets : options_.budgets_of_parts;
    for (std::size_t k = 0; k <= tries && !stop(); ++k) {
      const auto within = table_budget - static_cast<bytes_t>(static_cast<double>(table_budget) * static_cast<double>(k) /
                                                              (1.5 * static_cast<double>(tries)));
      if (!table.seconds(within)) break;
      auto steps = table.steps(within);
      if (steps == before) continue;
      auto order = parts.order(steps);
      before = std::move(steps);
      const auto needs = measure_order(l.p, order);
      if (needs.peak <= l.budget())
        l.offer(std::move(order));
      else if (needs.seconds < l.seconds())
        over_budget.push_back(std::move(order));
    }
    constexpr std::size_t max_repaired = 4;  // number of orders to repair: those with the smallest budgets
    if (!options_.evictions) return;
    for (std::size_t i = over_budget.size(); i-- > 0 && i + max_repaired >= over_budget.size() && !stop();)
      order::evict_with_each_exponent(l.p, over_budget[i], l.budget(), stop, [&](auto order) { l.offer(std::move(order)); });
  }

 private:
  options options_;
};

}  // namespace remat
