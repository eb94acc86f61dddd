// SPDX-License-Identifier: Apache-2.0
/// @file
/// Optimal checkpointing of chains.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/block_problem.hpp>
#include <remat/chain/fastest_persistent.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/structure/blocks.hpp>

namespace remat {

/// The fastest persistent schedule of a network that is a chain of blocks, one to ten thousand of them: each block is saved as a
/// whole, or computed again from a checkpoint.
///
/// `fastest_persistent` finds it, exact in bytes. The memory model of chains is cautious, so schedules for somewhat larger
/// budgets, from a `persistent_table`, are evaluated as well, and the fastest that fits is taken.
///
/// `result::scope` is the class that was searched, "persistent schedules of the chain": all blocks as above, within the budget as
/// the chain counts memory. `scope_bound` is proven for it; `scope_gap()` is 0 if nothing in the class is faster than what came
/// out. A graph without a chain is a chain of one block, of which nothing can be computed again: its only schedule is store-all,
/// and where that does not fit, `scope_bound` is infinite and the status `not_applicable`.
///
/// Complexity: that of `find_blocks`, `fastest_persistent` and `persistent_table`.
///
/// Reference: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains", INRIA RR-9302
/// (2019).
/// @code
/// auto r = remat::solve(p, budget, remat::rotor{});
/// @endcode
class rotor {
 public:
  struct options {
    structure::block_options blocks = {.most = 10'000, .least = 1};  ///< how the graph is cut
    std::size_t slots = 2000;                                        ///< of the table, at most, >= 1
    std::size_t table_links = 400;                                   ///< longer chains get no table, but a few searches
    std::size_t labels = 1 << 20;  ///< of the search, `fastest_persistent_options::most_labels`, >= 1
  };

  rotor() : rotor(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit rotor(const options& o) : options_(o) {
    if (o.blocks.interface < 1) throw bad_option("rotor.blocks.interface must be >= 1, got 0");
    if (o.blocks.most < 1) throw bad_option("rotor.blocks.most must be >= 1, got 0");
    if (o.slots < 1) throw bad_option("rotor.slots must be >= 1, got 0");
    if (o.table_links > chain::persistent_table::most_links)
      throw bad_option("rotor.table_links must be <= " + std::to_string(chain::persistent_table::most_links) + ", got " +
                       std::to_string(o.table_links));
    if (o.labels < 1) throw bad_option("rotor.labels must be >= 1, got 0");
  }

  std::string name() const { return "rotor"; }

  /// @throws bad_option if `blocks.backward_start` is no operation
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (incumbent all(p, budget); all.offer(needed_operations(p))) {
      result r;
      all.put_into(r);
      r.scope = scope;
      r.scope_bound = all.seconds();
      return r;
    }
    return ground(p, options_, budget, m).solve(budget, m);
  }

  /// The answers for several budgets, from one table.
  /// @param p       the problem
  /// @param budgets bytes, each >= 0, in any order
  /// @param m       limits of all together
  /// @return as from `remat::solve`, in the order of the budgets
  /// @throws bad_option for a negative budget, or if `blocks.backward_start` is no operation
  std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const {
    std::vector<result> results;
    if (budgets.empty()) return results;
    const ground shared(p, options_, *std::max_element(budgets.begin(), budgets.end()), m);
    for (std::size_t k = 0; k < budgets.size(); ++k)
      results.push_back(budget_slice(p, budgets[k], name(), m, static_cast<double>(budgets.size() - k),
                                     [&](monitor& part) { return shared.solve(budgets[k], part); }));
    return results;
  }

 private:
  static constexpr const char* scope = "persistent schedules of the chain";

  /// The graph as a chain, and its table.
  class links {
   public:
    links(const problem& p, const options& o, const structure::block_options& cut, bytes_t budget, monitor& m)
        : p_(p), options_(o), blocks_(structure::find_blocks(p, cut)), joint_(p, blocks_) {
      const auto n = blocks_.blocks.size();
      for (const auto& b : joint_.problems())
        for (auto x : b.once()) once_ += p.operations()[x].seconds;
      m.report({.stage = n < 2 ? structure::no_chain : "chain of " + std::to_string(n) + " blocks"});
      if (n < 2 || n > o.table_links) return;
      const auto within = std::max<bytes_t>(0, budget - joint_.aside()) + (budget - p.held_bytes()) / 4;
      const auto slots = std::clamp<std::size_t>(table_size / (n * (n + 1)), 1, o.slots);
      table_.emplace(joint_.links(), within, chain::persistent_table::options{slots, [&] { return m.stopped(); }});
    }

    /// Offers schedules within `budget` to `best`. @return a bound on the time of the chain's schedules, s
    double solve(bytes_t budget, incumbent& best, monitor& m) const {
      if (blocks_.blocks.size() < 2) return std::numeric_limits<double>::infinity();
      const auto bound = search(budget, best, m);
      if (table_ && table_->complete())
        read_table(best, budget, m);
      else
        for (const double more : {1.02, 1.05, 1.1, 0.98, 0.95})
          if (!m.stopped()) search(static_cast<bytes_t>(static_cast<double>(budget) * more), best, m);
      return bound;
    }
    std::size_t count() const { return blocks_.blocks.size(); }

   private:
    /// Offers what the search finds for `budget`. @return a bound for the schedules of the chain
    double search(bytes_t budget, incumbent& best, monitor& m) const {
      const auto until = m.elapsed() + 0.3 * m.remaining();
      const auto answer =
          chain::fastest_persistent(joint_.links(), budget - joint_.aside(),
                                    {.most_labels = options_.labels, .stop = [&] { return m.stopped() || m.elapsed() > until; }});
      if (answer.found() && best.offer(joint_.order(answer.steps))) best.report(m, "chain, exact in bytes");
      return answer.bound + once_;
    }
    /// Offers schedules of the table, the fastest first. What it takes to be a little slower may be faster once evaluated, so the
    /// search goes on for a while.
    void read_table(incumbent& best, bytes_t budget, monitor& m) const {
      const auto front = table_->front();
      std::size_t more = 100;
      bool fits = false;
      for (auto at = front.rbegin(); at != front.rend() && more > 0 && !m.stopped(); ++at) {
        const auto order = joint_.order(table_->steps(at->first));
        fits = fits || measure_order(p_, order).peak <= budget;
        if (best.offer(order)) best.report(m, "table");
        if (fits) --more;
      }
    }

    static constexpr std::size_t table_size = std::size_t{1} << 26;  // twice the numbers in a table
    const problem& p_;
    const options& options_;
    structure::block_chain blocks_;
    chain::block_joint joint_;
    double once_ = 0;  // s, of operations that no link counts
    std::optional<chain::persistent_table> table_;
  };

  /// What the answers for all budgets share: the finest chain and, if that is long, one of larger blocks. The latter has fewer
  /// choices, but shares less between blocks that would be retained throughout.
  class ground {
   public:
    ground(const problem& p, const options& o, bytes_t budget, monitor& m) : p_(p), fine_(p, o, o.blocks, budget, m) {
      auto larger = o.blocks;
      larger.most = std::min<std::size_t>(larger.most, 48);
      larger.least = std::max<std::size_t>(larger.least, 8);
      if (fine_.count() > larger.most && !m.stopped()) coarse_.emplace(p, o, larger, budget, m);
    }
    result solve(bytes_t budget, monitor& m) const {
      result r;
      incumbent best(p_, budget);
      best.offer(needed_operations(p_));
      r.scope = scope;
      r.scope_bound = fine_.solve(budget, best, m);
      if (fine_.count() < 2) r.status = status::not_applicable, r.reason = structure::no_chain;
      if (coarse_ && !m.stopped()) coarse_->solve(budget, best, m);
      best.put_into(r);
      return r;
    }

   private:
    const problem& p_;
    links fine_;
    std::optional<links> coarse_;
  };

  options options_;
};

}  // namespace remat
