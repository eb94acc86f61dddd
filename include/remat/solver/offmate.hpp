// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recomputation and copies to the host, planned together. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/slower_links.hpp>
#include <remat/core/solve.hpp>
#include <remat/order/copy_search.hpp>
#include <remat/solver/min_cut.hpp>

namespace remat {

/// Recomputation and copies to the host together, for problems of any shape that allow copies, and for those with several
/// tiers (`order::unplannable` says which it cannot plan). A plain problem that allows none is left to Inner.
///
/// Copies make the budget look larger. So recomputation alone is planned for *virtual* budgets, from the budget to what store-all
/// needs, copies are laid over each of these orders within the true budget (`order::lay_copies`), and the best ones are worked on
/// (`order::copy_search`). The ends of the scan are recomputation alone and copies alone. Proves `bound::copy_bound`, or
/// `bound::tier_bound`, besides. Of a problem that is not plain, recomputation is planned for what stays on the device
/// (`order::without_host`).
///
/// Links may be slower than their rates say, which costs most where they are busy all the time: with `rate_share` of 0.9, say,
/// what is planned still takes about as long at nine tenths of the rates, for a little more at all of them.
///
/// @tparam Inner plans recomputation; for the most promising virtual budgets, after `min_cut` has planned for all of them
///
/// Complexity: that of `min_cut` and Inner for some virtual budgets, and `search` rounds.
/// @code
/// auto r = remat::solve(p, budget, remat::offmate{}, {.seconds = 10});
/// @endcode
template <solver Inner = min_cut>
class offmate {
 public:
  struct options {
    std::size_t scan = 20;            ///< virtual budgets, besides the largest, >= 1
    std::size_t inner = 3;            ///< of them, the most promising, are planned for by Inner
    std::size_t starts = 4;           ///< orders that are worked on, the best first, >= 1
    std::size_t search = 600'000;     ///< each for `order::patience_for` that many rounds without an improvement
    std::size_t idle = 4;             ///< so many times without an improvement and the search ends; 0: none
    std::optional<schedule> start{};  ///< a schedule that is known, to begin with; of its copies nothing is taken
    double rate_share = 1;            ///< copies are planned as if every link had this share of its rate, in (0, 1]
  };

  offmate() : offmate(Inner()) {}
  explicit offmate(Inner inner) : offmate(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  offmate(Inner inner, const options& o) : inner_(std::move(inner)), options_(o) {
    if (o.scan < 1) throw bad_option("offmate.scan must be >= 1, got 0");
    if (o.starts < 1) throw bad_option("offmate.starts must be >= 1, got 0");
    if (!(o.rate_share > 0 && o.rate_share <= 1))
      throw bad_option("offmate.rate_share must be in (0, 1], got " + std::to_string(o.rate_share));
  }

  std::string name() const { return "offmate/" + std::string(inner_.name()); }
  bool plans_tiers() const { return true; }

  offmate with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  /// @throws what Inner throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (p.plain() && !p.copies()) return inner_.solve(p, budget, m);
    if (options_.rate_share < 1) return solve_for_less(p, budget, m);
    result r;
    const auto needed = needed_operations(p);
    if (auto why = p.plain() ? std::string() : order::unplannable(p); !why.empty()) {
      r.status = status::not_applicable;
      r.reason = std::move(why);
      return r;
    }
    if (incumbent all(p, budget); p.plain() && all.offer(needed)) {
      all.put_into(r);
      return r;
    }
    scan now{p.plain() ? p.with_copies({}) : order::without_host(p), budget, 0, m, {p, budget}, {}, 0};
    now.most = measure_order(now.plain, needed).peak;
    if (!p.plain()) now.least = std::min(now.most, bounds_without_search(now.plain).budget);
    now.offer(needed, now.most);
    bound::prove_bound(p, budget, r, [&] { return m.stopped(); });
    now.bound = r.bound;
    if (options_.start) {
      const auto order = compute_order(*options_.start);
      now.offer(order, measure_order(now.plain, order).peak);
    }
    if (!now.done()) look(now);
    now.best.put_into(r);
    return r;
  }

 private:
  /// An order, and the virtual budget that it was planned for.
  struct start {
    std::vector<operation_id> order;
    bytes_t budget;
    double seconds;  ///< with copies
  };
  struct scan {
    const problem plain;  ///< the same without copies
    bytes_t least, most;  ///< virtual budgets: from the true one, or what the device needs of it, up to what store-all needs
    monitor& m;
    order::copy_incumbent best;
    std::vector<start> starts;
    double bound;

    bool done() const { return m.stopped() || best.seconds() * (1 - m.limits().gap) <= bound; }
    void offer(std::vector<operation_id> order, bytes_t virtual_budget) {
      const auto before = best.seconds();
      const auto laid = best.offer(order);
      if (best.seconds() < before) best.report(m, "scan", bound);
      if (laid) starts.push_back({std::move(order), virtual_budget, laid->seconds});
    }
    void rank() {
      std::stable_sort(starts.begin(), starts.end(), [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
    }
  };

  /// Plans for slower links. What is proven there is not true of `p`.
  result solve_for_less(const problem& p, bytes_t budget, monitor& m) const {
    auto slower = *this;
    slower.options_.rate_share = 1;
    monitor part(m, 1, [tell = report_to(m)](progress x) {
      x.bound = 0;
      return tell(x);
    });
    result proven;
    if (!p.plain() && !order::unplannable(p).empty()) return slower.solve(p, budget, part);
    bound::prove_bound(p, budget, proven, [&] { return m.stopped(); });
    auto r = slower.solve(with_slower_links(p, options_.rate_share), budget, part);
    r.bound = proven.bound;
    return r;
  }

  /// Plans recomputation quickly for virtual budgets, and offers the orders.
  static void sweep(scan& now, const std::vector<bytes_t>& budgets) {
    monitor part(now.m, 0.2, [](const progress&) { return control::go_on; });
    const auto planned = min_cut({.bound = false, .repairs = 10'000, .rounds = 0}).sweep(now.plain, budgets, part);
    for (std::size_t i = 0; i < budgets.size() && !now.m.stopped(); ++i)
      if (planned[i].found()) now.offer(compute_order(planned[i].schedule), budgets[i]);
    now.rank();
  }

  void look(scan& now) const {
    const auto step = (now.most - now.least) / static_cast<bytes_t>(options_.scan);
    std::vector<bytes_t> budgets;
    for (std::size_t i = 0; i < options_.scan; ++i) budgets.push_back(now.least + step * static_cast<bytes_t>(i));
    sweep(now, budgets);
    const auto promising = [&] { return now.starts.empty() ? now.least : now.starts.front().budget; };
    budgets.clear();
    for (bytes_t i = -3; i <= 3; ++i)
      if (const auto budget = promising() + i * step / 4; i != 0 && budget >= now.least && budget < now.most)
        budgets.push_back(budget);
    if (!now.done()) sweep(now, budgets);

    budgets.clear();
    if (now.starts.empty()) budgets.push_back(now.least);
    for (std::size_t i = 0; i < std::min(options_.inner, now.starts.size()); ++i) budgets.push_back(now.starts[i].budget);
    for (std::size_t i = 0; i < budgets.size() && !now.done(); ++i) {
      monitor part(now.m, 0.3 / static_cast<double>(budgets.size() - i), [&](const progress& x) {
        if (x.schedule) now.offer(compute_order(*x.schedule), budgets[i]);
        return now.done() ? control::stop : control::go_on;
      });
      const auto found = inner_.solve(now.plain, budgets[i], part);
      if (found.found()) now.offer(compute_order(found.schedule), budgets[i]);
    }

    now.rank();
    if (now.starts.empty()) return;
    auto best_budget = now.starts.front().budget;
    now.starts.resize(std::min(now.starts.size(), std::max<std::size_t>(1, options_.starts)));
    for (std::size_t i = 0, idle = 0; idle < options_.idle && !now.done(); ++i) {  // the best and the others in turn
      const bool anew = i % 2 == 1;
      const auto& other = now.starts[i / 2 % now.starts.size()];
      const auto before = now.best.seconds();
      const auto budget = anew ? other.budget : best_budget;
      monitor part(now.m, 0.5);
      order::copy_search(now.plain, anew ? other.order : now.best.order(), budget, now.best, part,
                         {.patience = order::patience_for(now.plain, options_.search), .stream = i}, now.bound);
      if (now.best.seconds() < before) best_budget = budget;
      idle = now.best.seconds() < before * (1 - 1e-6) ? 0 : idle + 1;
    }
  }

  Inner inner_;
  options options_;
};

}  // namespace remat
