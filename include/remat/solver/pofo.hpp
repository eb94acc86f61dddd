// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recomputation and copies to the host on chains, by dynamic programming. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/fastest_with_copies.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/copies/copy_search.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/hierarchy/part_chain.hpp>
#include <remat/solver/prove_bound.hpp>
#include <remat/structure/partition.hpp>

namespace remat {

/// Plans recomputation and copies to the host together for a network that is a chain of blocks. The forward of each block saves
/// what its backward reads, or is run again. The input of each block is kept or moved (`chain::fastest_with_copies`).
///
/// The recurrence chooses what to recompute and which values may move. `copies::schedule_copies` lays copies over this order: for
/// these values and, if that is faster, for all values. The recurrence counts some memory and time too high and some too low. So
/// it also runs for other budgets nearby (`nearby`), and the fastest schedule that fits, by `evaluate`, is taken. The graph is
/// cut into blocks and into parts as by `rotor`.
///
/// A problem without copies, or without a chain of blocks, is `not_applicable`, unless store-all fits. Proves `bound::copy_bound`
/// as well.
///
/// Complexity: that of `find_partition`, `persistent_table` and, for each of `nearby`, `fastest_with_copies`.
///
/// Reference: Beaumont, Eyraud-Dubois, Shilova, "Efficient Combination of Rematerialization and Offloading for Training DNNs",
/// NeurIPS 2021.
/// @code
/// auto r = remat::solve(p, budget, remat::pofo{});
/// @endcode
class pofo {
 public:
  struct options {
    structure::partition_options blocks = {.size = 1, .most = 200, .interface = 1};  ///< how the graph is cut into the chain
    std::vector<std::size_t> sizes = {4, 8, 16};             ///< operations per part in further cuts of the graph, each >= 1
    std::size_t slots = 500;                                 ///< most units of memory in the table of recomputations, >= 1
    std::size_t labels = 300;                                ///< `fastest_with_copies_options::max_labels`, >= 1
    std::vector<double> nearby = {1, 1.1, 1.25, 1.5, 0.95};  ///< budgets to try, times the budget less held bytes, in (0, 10^6)
  };

  pofo() : pofo(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit pofo(const options& o) : options_(o) {
    if (o.slots < 1) throw bad_option("pofo.slots must be >= 1, got 0");
    if (o.labels < 1) throw bad_option("pofo.labels must be >= 1, got 0");
    if (o.blocks.most > chain::persistent_table::max_links)
      throw bad_option("pofo.blocks.most must be at most " + std::to_string(chain::persistent_table::max_links) + ", got " +
                       std::to_string(o.blocks.most));
    for (const double x : o.nearby)
      if (!(x > 0 && x < 1e6)) throw bad_option("pofo.nearby must be in (0, 10^6), got " + std::to_string(x));
  }

  std::string name() const { return "pofo"; }

  /// @throws bad_option if the options of the blocks are out of range
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (auto all = store_all_if_it_fits(p, budget)) return *std::move(all);
    if (!p.copies()) return refused(copies::no_copies);
    result r;
    prove_bound(p, budget, r, m.stop_check());
    copies::copy_incumbent best(p, budget);
    bool any = search(p, budget, options_.blocks, r.bound, best, m);
    for (const auto size : options_.sizes)
      if (!m.stopped())
        any = search(p, budget, {.backward_start = options_.blocks.backward_start, .size = size, .most = max_parts}, r.bound,
                     best, m) ||
              any;
    if (!any) r = refused(structure::no_chain, std::move(r));
    best.put_into(r);
    return r;
  }

 private:
  static constexpr std::size_t max_parts = 200;  // of the other cuts; more parts take long and gain nothing

  /// Cuts the graph in one way, and offers its fastest schedules.
  /// @return false if it cannot be cut
  bool search(const problem& p, bytes_t budget, const structure::partition_options& cut, double bound,
              copies::copy_incumbent& best, monitor& m) const {
    const hierarchy::saved_parts parts(p, structure::find_partition(p, cut, m.stop_check()));
    m.report({.stage = parts.size() < 2 ? structure::no_chain : "chain of " + std::to_string(parts.size()) + " blocks"});
    if (parts.size() < 2) return false;
    const auto& c = parts.chain();
    const auto stop = m.stop_check();
    const auto within = [&](double share) {  // bytes for the chain
      return p.held_bytes() + static_cast<bytes_t>(share * static_cast<double>(budget - p.held_bytes())) - c.unmodelled_bytes();
    };
    if (options_.nearby.empty()) return true;
    const auto largest = within(*std::max_element(options_.nearby.begin(), options_.nearby.end()));
    const chain::persistent_table table(c.model(), largest + c.model().links.front().input, {options_.slots, stop});
    for (const auto share : options_.nearby) {
      if (best.seconds() * (1 - m.limits().gap) <= bound) return true;
      const auto found = chain::fastest_with_copies(c.model(), within(share), *p.copies(), table, {options_.labels, stop});
      if (stop()) return true;
      if (!found.found()) continue;
      const auto order = c.order(found.steps);
      const auto before = best.seconds();
      best.offer({order, copies::departures_of(values_of(p, parts, found.moved))});
      best.offer({order});
      if (best.seconds() < before) best.report(m, "chain of " + std::to_string(parts.size()) + " blocks", bound);
    }
    return true;
  }
  /// Per value: true if it belongs to the input of a link in `links`, that is, if the part before makes it.
  static std::vector<bool> values_of(const problem& p, const hierarchy::saved_parts& parts, const std::vector<bool>& links) {
    std::vector<bool> values(p.values().size(), false);
    for (value_id v = 0; v < values.size(); ++v) {
      if (p.is_source(v)) continue;
      const auto part = parts.index().part(p.producer(v));
      values[v] = part != none && part + 1 < links.size() && links[part + 1];
    }
    return values;
  }

  options options_;
};

}  // namespace remat
