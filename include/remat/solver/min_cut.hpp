// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules for any graph from minimum cuts and evictions. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/sample_cuts.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/order/destroy_repair.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/local_search.hpp>
#include <remat/order/replay.hpp>
#include <remat/order/retain_more.hpp>
#include <remat/solver/lower_peak.hpp>
#include <remat/solver/order_in_phases.hpp>
#include <remat/solver/prove_bound.hpp>

namespace remat {

/// Keeps across the heaviest moments the values that minimum cuts choose, and recomputes all others where they are used. Local
/// search makes the orders fit and faster. For graphs of any shape, also of thousands of operations; proves a bound as well.
///
/// The sets to keep come from `retention_cut` at the breakpoints of its multiplier, and from mixtures of neighbouring sets: the
/// leaner one for the first part of the graph, the richer one for the rest. Each set is played as it is. The orders that come
/// closest to the budget are made to fit by `order::destroy_repair` and by `eviction`, and `local_search` improves the best. If
/// no order fits, `order_in_phases` makes one in phases, or `lower_peak` lowers the peak of store-all. A start that needs up to a
/// tenth more than the budget is lowered before the cuts. Does not use copies to the host.
///
/// Complexity: some dozens of maximum flows, `options::mixtures` * 10 evaluations per moment, and a number of rounds of
/// `local_search` that falls with the number of operations.
/// @code
/// auto r = remat::solve(p, budget, remat::min_cut{}, {.seconds = 10});
/// if (r.found()) std::cout << r.seconds << " s, within " << 100 * r.gap() << " % of the optimum\n";
/// @endcode
class min_cut {
 public:
  struct options {
    std::size_t moments = 4;             ///< operations across which retention is optimised, >= 1
    std::size_t cuts = 16;               ///< most cuts per moment, >= 2
    std::size_t mixtures = 6;            ///< mixtures per pair of neighbouring cuts, >= 1; fewer above 20 000 operations
    bool bound = true;                   ///< prove a lower bound as well
    std::size_t repairs = 300000;        ///< most operations times starts to repair; fewer above 1000 operations
    std::size_t effort = 800000;         ///< effort of `local_search`, for `order::patience_for`; 0: none
    std::optional<schedule> start = {};  ///< a known schedule to start from; its copies are ignored
  };

  min_cut() : min_cut(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit min_cut(const options& o) : options_(o) {
    if (o.moments < 1) throw bad_option("min_cut.moments must be >= 1, got 0");
    if (o.cuts < 2) throw bad_option("min_cut.cuts must be >= 2, got " + std::to_string(o.cuts));
    if (o.mixtures < 1) throw bad_option("min_cut.mixtures must be >= 1, got 0");
  }

  std::string name() const { return "min_cut"; }
  min_cut with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  result solve(const problem& p, bytes_t budget, monitor& m) const {
    shared_state known;
    return solve(p, budget, known, m);
  }

  /// Solves for several budgets. They share the cuts, and a schedule for less memory is a start for more, so more budget is never
  /// slower.
  /// @param p       the problem
  /// @param budgets bytes, >= 0, in any order
  /// @param m       limits of the whole sweep
  /// @return a result per budget, in the order given, each completed as by `solve(p, budget, min_cut, ..)`
  /// @throws bad_option for a negative budget
  std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, monitor& m) const {
    std::vector<std::size_t> ascending(budgets.size());
    std::iota(ascending.begin(), ascending.end(), std::size_t{0});
    std::sort(ascending.begin(), ascending.end(), [&](auto a, auto b) { return budgets[a] < budgets[b]; });
    std::vector<result> results(budgets.size());
    shared_state known;
    for (std::size_t i = 0; i < ascending.size(); ++i) {
      const auto budget = budgets[ascending[i]];
      results[ascending[i]] = budget_slice(p, budget, name(), m, static_cast<double>(ascending.size() - i),
                                           [&](monitor& part) { return solve(p, budget, known, part); });
    }
    return results;
  }

 private:
  using choice = bound::retention_cut::choice;

  /// An order to make fit, with its peak in bytes and its time.
  struct start {
    std::vector<operation_id> order;
    bytes_t peak;
    double seconds;
  };

  /// An operation across which retention is optimised, and its cuts, the most bytes first.
  struct moment {
    operation_id tau;
    std::vector<choice> choices;
  };

  /// State that is shared by searches for rising budgets.
  struct shared_state {
    std::vector<moment> cuts;
    std::vector<start> starts;
    std::vector<operation_id> fastest;  // order so far
    bytes_t budget_bound = 0;           // no schedule fits a smaller budget
  };

  result solve(const problem& p, bytes_t budget, shared_state& known, monitor& m) const {
    result r;
    r.budget_bound = known.budget_bound;
    incumbent best(p, budget);
    if (!best.offer(needed_operations(p))) {
      if (!known.fastest.empty()) best.offer(known.fastest);
      if (options_.start) lower(p, options_.start, best, m);
      auto cuts = known.cuts.empty() ? heaviest_moments(p, budget, m) : std::move(known.cuts);
      offer_fitting(p, budget, cuts, best, m);
      if (options_.bound) prove_bound(p, budget, r, m.stop_check());
      known.budget_bound = r.budget_bound;
      if (r.status == status::infeasible) return r;
      if (!best.found() && !options_.start) lower(p, {}, best, m);
      known.cuts = std::move(cuts);
      if (!m.stopped()) {
        if (known.starts.empty()) known.starts = starts(p, known.cuts, m, best, r.bound);
        search(p, budget, known.starts, best, m, r.bound);
      }
    }
    if (best.found()) known.fastest = best.order();
    best.put_into(r);
    return r;
  }

  /// Offers the first of these that is found: the start, if it fits; an order in phases; the start with a lower peak; store-all
  /// with a lower peak. Does nothing for a start that needs over a tenth more than the budget. Takes only part of the time, so
  /// that other methods can follow.
  static void lower(const problem& p, const std::optional<schedule>& start, incumbent& best, monitor& m) {
    std::vector<std::vector<operation_id>> from = {needed_operations(p)};
    if (start) from.insert(from.begin(), compute_order(*start));
    const auto peak = measure_order(p, from[0]).peak;
    if (m.stopped() || (start && static_cast<double>(peak) > 1.1 * static_cast<double>(best.budget()))) return;
    std::optional<std::vector<operation_id>> order;
    if (peak > best.budget()) {
      const monitor part(m, 0.2);
      order = order_in_phases(p, best.budget(), part.stop_check());
    }
    const monitor part(m, 0.3);
    const auto stop = part.stop_check();
    for (std::size_t i = 0; !order && i < from.size(); ++i) order = lower_peak(p, from[i], best.budget(), stop);
    if (order && best.offer(order::retain_more(p, *order, best.budget(), stop))) best.report(m, "lower peak");
  }

  /// The lean choice for values that the first `count` operations make, the rich choice for all others.
  static choice mix(const problem& p, const choice& lean, const choice& rich, index_t count) {
    choice c = rich;
    for (value_id v = 0; v < c.retained.size(); ++v)
      if (!p.is_source(v) && p.producer(v) < count) c.retained[v] = lean.retained[v];
    return c;
  }

  /// The heaviest moments, with their cuts.
  std::vector<moment> heaviest_moments(const problem& p, bytes_t budget, monitor& m) const {
    std::vector<moment> list;
    for (const auto& cut : bound::most_demanding_cuts(p, budget, options_.moments, m.stop_check()))
      if (!m.stopped()) list.push_back({cut->tau(), cut->breakpoints(options_.cuts)});
    return list;
  }

  /// Offers the cuts that fit. If the richer neighbour of one does not fit, bisects for the mixture of both that just fits.
  /// Complexity: O(cuts + log(operations)) orders played per moment.
  void offer_fitting(const problem& p, bytes_t budget, const std::vector<moment>& moments, incumbent& best, monitor& m) const {
    for (const auto& heavy : moments) {
      const auto fits = [&](const choice& c) {
        const auto order = order::replay(p, {heavy.tau}, {c.retained});
        if (!order) return false;
        if (measure_order(p, *order).peak > budget) return false;
        if (best.offer(*order)) m.report({.stage = "cuts", .best = best.seconds()});
        return true;
      };
      bool previous_fits = true;
      for (std::size_t i = 0; i < heavy.choices.size() && !m.stopped(); ++i) {
        const bool fitting = fits(heavy.choices[i]);
        index_t low = 0, high = fitting && !previous_fits ? index_t{heavy.tau}
                                                          : 0;  // the mixture with `high` fits, that with `low` does not
        while (low + 1 < high && !m.stopped()) {
          const auto middle = low + (high - low) / 2;
          (fits(mix(p, heavy.choices[i], heavy.choices[i - 1], middle)) ? high : low) = middle;
        }
        previous_fits = fitting;
      }
    }
  }

  /// Store-all, and the orders that keep the values of each cut and mixture.
  /// @param best is offered each order that fits
  std::vector<start> starts(const problem& p, const std::vector<moment>& moments, monitor& m, incumbent& best,
                            double bound) const {
    std::vector<start> list;
    const auto add = [&](std::vector<operation_id> order) {
      const auto needs = measure_order(p, order);
      if (needs.peak <= best.budget() && best.offer(order)) m.report({.stage = "cuts", .best = best.seconds(), .bound = bound});
      list.push_back({std::move(order), needs.peak, needs.seconds});
    };
    add(needed_operations(p));
    const auto mixtures = std::clamp<std::size_t>(options_.mixtures * 20'000 / (p.operations().size() + 1), 1, options_.mixtures);
    for (const auto& [tau, choices] : moments)
      for (std::size_t i = 0; i + 1 < choices.size() && !m.stopped(); ++i)
        for (std::size_t part = 0; part <= mixtures; ++part) {
          if (part == 0 && i > 0) continue;
          const auto count = static_cast<index_t>(tau * part / mixtures);
          const auto mixed = mix(p, choices[i + 1], choices[i], count);
          if (auto order = order::replay(p, {tau}, {mixed.retained})) add(std::move(*order));
        }
    return list;
  }

  /// Makes the most promising of `starts` fit the budget, and improves the best.
  void search(const problem& p, bytes_t budget, const std::vector<start>& starts, incumbent& best, monitor& m,
              double bound) const {
    const auto stop = m.stop_check();
    const auto offer = [&](const std::vector<operation_id>& order, const char* stage) {
      if (best.offer(order)) best.report(m, stage, bound);
    };
    const auto good_enough = [&] { return best.found() && best.seconds() * (1 - m.limits().gap) <= bound; };
    std::vector<const start*> by_estimate;
    for (const auto& s : starts) {
      if (s.peak <= budget) offer(s.order, "cuts");
      by_estimate.push_back(&s);
    }
    // Estimate: a byte over the budget costs as much time as a byte that the order has already saved.
    const auto estimated_seconds = [&](const start& s) {
      const auto saved = static_cast<double>(starts[0].peak - s.peak) + 0.05 * static_cast<double>(starts[0].peak);
      const auto over = static_cast<double>(std::max<bytes_t>(0, s.peak - budget));
      return s.seconds + over * (s.seconds - starts[0].seconds + 0.01 * starts[0].seconds) / std::max(saved, 1.0);
    };
    std::stable_sort(by_estimate.begin(), by_estimate.end(),
                     [&](auto a, auto b) { return estimated_seconds(*a) < estimated_seconds(*b); });
    const auto operations = std::max<std::size_t>(1, p.operations().size());
    std::vector<std::vector<operation_id>> improving_orders;  // each faster than all before
    order::destroy_repair candidate(p, budget, m.limits().seed);
    const auto repair_cost = operations * std::max<std::size_t>(1, operations / 1000);  // cost of a repair: a pass for each drop
    const auto affordable = [&](std::size_t i) {
      return std::max<std::size_t>(i, best.found()) * repair_cost <= options_.repairs;
    };
    for (std::size_t i = 0; i < by_estimate.size() && affordable(i) && !stop() && !good_enough(); ++i) {
      candidate.load(by_estimate[i]->order);
      if (!candidate.repair(0, best.seconds() * 1.5, stop)) continue;
      candidate.retain(false, stop);
      const auto before = best.seconds();
      offer(candidate.order(), "repairs");
      if (best.seconds() < before) improving_orders.push_back(best.order());
    }
    for (const double distance : order::eviction::distances)
      for (std::size_t i = 0;
           i < by_estimate.size() && (i == 0 || 4 * i * operations < options_.repairs) && !stop() && !good_enough(); ++i)
        if (auto evicted = order::eviction(p, by_estimate[i]->order).run(budget, {.distance = distance}, stop)) {
          candidate.load(*evicted);
          candidate.retain(false, stop);
          const auto before = best.seconds();
          offer(candidate.order(), "evictions");
          if (best.seconds() < before) improving_orders.push_back(best.order());
        }
    for (std::size_t i = improving_orders.size(); i-- > 0 && i + 3 >= improving_orders.size() && !stop() && !good_enough();)
      offer(order::retain_more(p, improving_orders[i], budget, stop), "retention");
    if (options_.effort > 0 && !stop() && !good_enough())
      order::local_search(p, best.found() ? best.order() : by_estimate[0]->order, best, m,
                          {.patience = order::patience_for(p, options_.effort)}, bound);
  }

  options options_;
};

}  // namespace remat
