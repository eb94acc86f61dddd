// SPDX-License-Identifier: Apache-2.0
/// @file
/// Optimal checkpointing of chains.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <remat/chain/fastest_persistent.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/hierarchy/part_chain.hpp>
#include <remat/structure/partition.hpp>

namespace remat {

/// Finds the fastest persistent schedule of a network that is a chain of one to ten thousand blocks. Each block is saved as a
/// whole, or recomputed from a checkpoint; saved values stay until the backward that reads them.
///
/// `fastest_persistent` finds it, exact in bytes. The chain counts memory too high. So schedules for somewhat larger budgets,
/// from a `persistent_table`, are evaluated as well, and the fastest that fits is taken. Other cuts into parts, where more than
/// one value may pass from part to part (`part_chain`), have tables and schedules, too.
///
/// `result::scope` is the class that was searched, "persistent schedules of the chain": all blocks as above, within the budget as
/// the chain counts memory. `scope_bound` is proven for it; `scope_gap()` is 0 if no schedule of the class is faster than the
/// result. A graph without a chain of blocks is a chain of one block, which cannot be recomputed. Its only schedule is store-all;
/// if this does not fit, `scope_bound` is infinite. If the graph cannot be cut in another way either, the status is
/// `not_applicable`.
///
/// Complexity: that of `find_partition`, `fastest_persistent` and `persistent_table`.
///
/// Reference: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", INRIA RR-9302
/// (2019).
/// @code
/// auto r = remat::solve(p, budget, remat::rotor{});
/// @endcode
class rotor {
 public:
  struct options {
    structure::partition_options blocks = {.size = 1, .most = 10'000, .interface = 1};  ///< how the graph is cut into the chain
    std::vector<std::size_t> sizes = {4, 8, 16};  ///< operations per part in further cuts of the graph, each >= 1
    std::size_t slots = 2000;                     ///< most units of memory of a table, >= 1
    std::size_t table_links = 400;                ///< longer chains are searched a few times, without a table; in [1, 2000]
    std::size_t labels = 1 << 20;                 ///< `fastest_persistent_options::max_labels`, >= 1
  };

  rotor() : rotor(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit rotor(const options& o) : options_(o) {
    if (o.slots < 1) throw bad_option("rotor.slots must be >= 1, got 0");
    if (o.table_links < 1 || o.table_links > chain::persistent_table::max_links)
      throw bad_option("rotor.table_links must be in [1, " + std::to_string(chain::persistent_table::max_links) + "], got " +
                       std::to_string(o.table_links));
    if (o.labels < 1) throw bad_option("rotor.labels must be >= 1, got 0");
  }

  std::string name() const { return "rotor"; }

  /// @throws bad_option if `blocks` or `sizes` are out of range
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (auto all = store_all_if_it_fits(p, budget)) {
      all->scope = scope;
      all->scope_bound = evaluate(p, all->schedule).seconds;
      return *std::move(all);
    }
    return shared_state(p, options_, budget, m).solve(budget, m);
  }

  /// Solves for several budgets with one table.
  /// @param p       the problem
  /// @param budgets bytes, each >= 0, in any order
  /// @param m       limits of the whole sweep
  /// @return results as from `remat::solve`, in the order of the budgets
  /// @throws bad_option for a negative budget, or if `blocks` or `sizes` are out of range
  std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const {
    std::vector<result> results;
    if (budgets.empty()) return results;
    const shared_state state(p, options_, *std::max_element(budgets.begin(), budgets.end()), m);
    for (std::size_t k = 0; k < budgets.size(); ++k)
      results.push_back(budget_slice(p, budgets[k], name(), m, static_cast<double>(budgets.size() - k),
                                     [&](monitor& part) { return state.solve(budgets[k], part); }));
    return results;
  }

 private:
  static constexpr const char* scope = "persistent schedules of the chain";

  /// One way to cut the graph into a chain, with its table.
  class chain_cut {
   public:
    chain_cut(const problem& p, const options& o, const structure::partition_options& cut, bytes_t budget, monitor& m)
        : p_(p), options_(o), parts_(p, structure::find_partition(p, cut, m.stop_check())) {
      const auto n = parts_.size();
      m.report({.stage = n < 2 ? structure::no_chain : "chain of " + std::to_string(n) + " blocks"});
      if (n < 2 || n > o.table_links) return;
      const auto within = std::max<bytes_t>(0, budget - chain().unmodelled_bytes()) + (budget - p.held_bytes()) / 4;
      const auto slots = std::clamp<std::size_t>(table_size / (n * (n + 1)), 1, o.slots);
      table_.emplace(chain().model(), within, chain::persistent_table::options{slots, m.stop_check()});
    }

    std::size_t size() const { return parts_.size(); }
    /// Offers the fastest schedule within `budget`, as the chain counts memory.
    /// @return a lower bound on the time of all these schedules, s
    double search(bytes_t budget, incumbent& best, monitor& m) const {
      if (size() < 2) return std::numeric_limits<double>::infinity();
      const auto deadline = m.elapsed() + 0.3 * m.remaining();
      const auto answer = chain::fastest_persistent(
          chain().model(), budget - chain().unmodelled_bytes(),
          {.max_labels = options_.labels, .stop = [&] { return m.stopped() || m.elapsed() > deadline; }});
      if (answer.found() && best.offer(chain().order(answer.steps))) best.report(m, "chain, exact in bytes");
      return answer.bound + parts_.alone();
    }
    /// Also offers schedules for budgets close to `budget`, because the chain does not count memory exactly.
    void search_around(bytes_t budget, incumbent& best, monitor& m) const {
      if (table_ && table_->complete())
        read_table(budget, best, m);
      else if (size() >= 2)
        for (const double more : {1.02, 1.05, 1.1, 0.98, 0.95})
          if (!m.stopped()) search(static_cast<bytes_t>(static_cast<double>(budget) * more), best, m);
    }

   private:
    const hierarchy::part_chain& chain() const { return parts_.chain(); }
    /// Offers schedules of the table, the fastest first. A schedule that the table counts as slower may be faster once evaluated,
    /// so the search goes on for a while after the first that fits.
    void read_table(bytes_t budget, incumbent& best, monitor& m) const {
      const auto front = table_->front();
      std::size_t remaining_tries = 100;
      bool fits = false;
      for (auto point = front.rbegin(); point != front.rend() && remaining_tries > 0 && !m.stopped(); ++point) {
        const auto order = chain().order(table_->steps(point->first));
        fits = fits || measure_order(p_, order).peak <= budget;
        if (best.offer(order)) best.report(m, "table");
        if (fits) --remaining_tries;
      }
    }

    static constexpr std::size_t table_size = std::size_t{1} << 26;  // most numbers in a table, times 2
    const problem& p_;
    const options& options_;
    hierarchy::saved_parts parts_;
    std::optional<chain::persistent_table> table_;
  };

  /// State shared by the answers for all budgets: the chain of blocks, and the other cuts.
  class shared_state {
   public:
    shared_state(const problem& p, const options& o, bytes_t budget, monitor& m) : p_(p) {
      cuts_.emplace_back(p, o, o.blocks, budget, m);
      for (const auto size : o.sizes)
        if (!m.stopped())
          cuts_.emplace_back(
              p, o,
              structure::partition_options{
                  .backward_start = o.blocks.backward_start, .size = size, .most = std::min(o.table_links, max_parts)},
              budget, m);
    }
    result solve(bytes_t budget, monitor& m) const {
      result r;
      incumbent best(p_, budget);
      best.offer(needed_operations(p_));
      r.scope = scope;
      r.scope_bound = cuts_.front().search(budget, best, m);
      bool any = false;
      for (const auto& c : cuts_) {
        any = any || c.size() > 1;
        if (!m.stopped()) c.search_around(budget, best, m);
      }
      if (!any) r = refused(structure::no_chain, std::move(r));
      best.put_into(r);
      return r;
    }

   private:
    static constexpr std::size_t max_parts = 200;  // of the other cuts; more parts take long and gain nothing
    const problem& p_;
    std::list<chain_cut> cuts_;
  };

  options options_;
};

}  // namespace remat
