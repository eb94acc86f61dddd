// SPDX-License-Identifier: Apache-2.0
/// @file
/// Two-level rematerialization: blocks by any solver, their chain by dynamic programming. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/graph/chain.hpp>
#include <remat/solver/block_problem.hpp>
#include <remat/solver/chain_table.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// Cuts the graph into a chain of blocks, asks another solver for several ways to run each block, joins them by the dynamic
/// program of `chain_table`, and improves the whole: what can be retained is. Equal blocks are solved once.
///
/// The program's memory model is cautious and `evaluate` exact, so several budgets of the program are tried, above the real one
/// too, and what does not fit is played with `eviction`. The schedules of `min_cut` compete; the fastest that fits wins. Where
/// the graph has no chain it is one block. Copies to the host are not used.
///
/// @tparam Inner the solver of the blocks, such as `checkmate<highs::backend>`
///
/// Complexity: that of `min_cut`, plus `saved` * `peaks` calls of Inner per distinct block, plus that of `chain_table`.
///
/// Reference: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
/// re-materialization in PyTorch", ICML 2023.
/// @code
/// using checkmate = remat::checkmate<remat::highs::backend>;
/// remat::rockmate method{checkmate(checkmate::options::fast())};
/// auto r = remat::solve(p, budget, method, {.seconds = 30});
/// @endcode
template <solver Inner = min_cut>
class rockmate {
 public:
  struct options {
    block_options blocks = {};           ///< how the graph is cut
    std::size_t saved = 6;               ///< bounds on what a block saves that are tried, >= 1
    std::size_t peaks = 3;               ///< bounds on a block's peak that are tried, >= 1
    std::size_t inner_operations = 120;  ///< blocks of more operations are given to `min_cut`
    std::size_t whole_operations = 60;   ///< problems of at most so many operations are given to Inner as a whole too
    std::size_t slots = 2000;            ///< of `chain_table`
    min_cut::options cut = {};           ///< of the competing `min_cut`
  };

  rockmate() : rockmate(Inner()) {}
  explicit rockmate(Inner inner) : rockmate(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  rockmate(Inner inner, const options& o) : inner_(std::move(inner)), options_(o) {
    if (o.saved < 1) throw bad_option("rockmate.saved must be >= 1, got 0");
    if (o.peaks < 1) throw bad_option("rockmate.peaks must be >= 1, got 0");
  }

  std::string name() const { return "rockmate/" + std::string(inner_.name()); }

  /// @throws bad_option if the options of the blocks are out of range; what Inner throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    incumbent best(p, budget);
    result r;
    if (best.offer(needed_operations(p))) {
      best.put_into(r);
      return r;
    }
    {
      monitor first(share(m, 0.3), [&](const progress& now) {
        m.report(now);
        return m.stop_requested() ? control::stop : control::go_on;
      });
      r = min_cut(options_.cut).solve(p, budget, first);
    }
    if (r.status == status::infeasible) return r;
    if (r.found()) best.offer(compute_order(r.schedule));
    const auto good_enough = [&] { return best.found() && best.seconds() * (1 - m.limits().gap) <= r.bound; };
    if (!good_enough() && !m.stopped()) join_blocks(p, budget, best, m, r.bound);
    if (!good_enough() && !m.stopped() && p.operations().size() <= options_.whole_operations) {
      const auto whole = remat::solve(p, budget, inner_, share(m, 1));
      if (whole.found()) best.offer(compute_order(whole.schedule));
    }
    best.put_into(r);
    return r;
  }

 private:
  using option = block_problem::option;

  static limits share(const monitor& m, double part) {
    auto l = m.limits();
    l.seconds = m.remaining() * part;
    return l;
  }

  /// Ways to run a block: those of Inner and of `min_cut` under several bounds, without the dominated ones.
  std::vector<option> block_options_for(const block_problem& b, const limits& each, const monitor& m) const {
    const auto plain = b.measure(needed_operations(b.bare()));
    const auto peak = measure_order(b.bare(), needed_operations(b.bare())).peak;
    const auto floor = bounds_without_search(b.bare()).budget;
    const auto least = b.least_saved(), most = std::max(plain.needs.saved, least);
    std::vector<option> found = {plain};
    const bool small = b.bare().operations().size() <= options_.inner_operations;
    for (std::size_t i = 0; i < options_.peaks; ++i)
      for (std::size_t j = 0; j <= options_.saved && !m.stopped(); ++j) {
        if (i == 0 && j == 0) continue;  // the plain order
        const double part = 1 - static_cast<double>(i) / static_cast<double>(options_.peaks);
        const auto within = floor + static_cast<bytes_t>(part * static_cast<double>(peak - floor));
        const auto saved = least + static_cast<bytes_t>((1 - static_cast<double>(j) / static_cast<double>(options_.saved)) *
                                                        static_cast<double>(most - least));
        const auto limited = b.with_workspace(std::max<bytes_t>(0, within - b.arriving() - saved));
        const auto add = [&](const result& r) {
          if (r.found()) found.push_back(b.measure(compute_order(r.schedule)));
        };
        add(remat::solve(limited, within, min_cut({.bound = false}), each));
        if constexpr (!std::is_same_v<Inner, min_cut>)
          if (small) add(remat::solve(limited, within, inner_, each));
      }
    const auto better = [](const chain::option& a, const chain::option& x) {
      return a.saved <= x.saved && a.saved + a.forward_transient <= x.saved + x.forward_transient &&
             a.saved + a.backward_transient <= x.saved + x.backward_transient && a.forward + a.backward <= x.forward + x.backward;
    };
    std::vector<option> front;
    for (std::size_t i = 0; i < found.size(); ++i) {
      bool dominated = false;
      for (std::size_t k = 0; k < found.size() && !dominated; ++k)
        dominated = k != i && better(found[k].needs, found[i].needs) && (k < i || !better(found[i].needs, found[k].needs));
      if (!dominated) front.push_back(found[i]);
    }
    return front;
  }

  void join_blocks(const problem& p, bytes_t budget, incumbent& best, monitor& m, double bound) const {
    const auto blocks = find_blocks(p, options_.blocks);
    const auto n = blocks.blocks.size();
    if (n < 2) return;
    const auto stop = [&] { return m.stopped(); };

    block_joint joint(p, blocks);
    const auto& problems = joint.problems();
    std::vector<std::size_t> twin(n);
    std::size_t distinct = 0;
    for (std::size_t i = 0; i < n; ++i) {
      twin[i] = 0;
      while (!(problems[twin[i]] == problems[i])) ++twin[i];
      distinct += twin[i] == i;
    }
    auto each = share(m, 0.6 / static_cast<double>(distinct * options_.peaks * (options_.saved + 1)));
    each.gap = std::max(each.gap, 1e-3);

    for (std::size_t i = 0; i < n; ++i) {
      m.report({.stage = "block " + std::to_string(i + 1) + " of " + std::to_string(n), .best = best.seconds(), .bound = bound});
      if (m.stopped()) return;
      if (twin[i] == i) {
        joint.set_options(i, block_options_for(problems[i], each, m));
      } else {
        std::vector<option> same;
        for (const auto& o : joint.ways(twin[i])) same.push_back(problems[i].translate(o, problems[twin[i]]));
        joint.set_options(i, std::move(same));
      }
    }

    const auto most = std::max<bytes_t>(0, budget - joint.aside()) + (budget - p.held_bytes()) / 3;
    const chain_table table(joint.links(), most, {.slots = options_.slots, .stop = stop});
    if (!table.complete()) return;
    std::vector<std::vector<index_t>> over;
    std::vector<chain_step> before;
    for (int k = 0; k <= 48 && !m.stopped(); ++k) {
      const auto within = most - static_cast<bytes_t>(static_cast<double>(most) * k / 72);
      if (!table.seconds(within)) break;
      const auto steps = table.steps(within);
      if (steps == before) continue;
      before = steps;
      auto order = joint.order(steps);
      const auto needs = measure_order(p, order);
      if (needs.peak > budget) {
        if (needs.seconds < best.seconds()) over.push_back(std::move(order));
        continue;
      }
      if (needs.seconds < best.seconds() * 1.02 || !best.found())
        if (best.offer(retain_more(p, std::move(order), budget, stop)))
          m.report({.stage = "chain of blocks", .best = best.seconds(), .bound = bound});
    }
    for (std::size_t i = over.size(); i-- > 0 && !m.stopped();)
      for (const double distance : {1.0, 0.5, 2.0}) {
        auto order = eviction(p, over[i]).run(budget, {.distance = distance}, stop);
        if (order && measure_order(p, *order).seconds < best.seconds() * 1.02 &&
            best.offer(retain_more(p, std::move(*order), budget, stop)))
          m.report({.stage = "chain of blocks", .best = best.seconds(), .bound = bound});
      }
  }

  Inner inner_;
  options options_;
};

}  // namespace remat
