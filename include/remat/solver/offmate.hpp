// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recomputation and copies to the host, planned together. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <future>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/cuts_throughout.hpp>
#include <remat/copies/copy_search.hpp>
#include <remat/copies/virtual_problem.hpp>
#include <remat/core/beside.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/slower_links.hpp>
#include <remat/core/solve.hpp>
#include <remat/order/destroy_repair.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/prove_bound.hpp>

namespace remat {

/// Recomputation and copies to the host together, for problems of any shape that allow copies, and for those with several
/// tiers (`copies::unplannable` says which it cannot plan). A plain problem that allows none is left to Inner.
///
/// Copies make the budget look larger. So recomputation alone is planned for *virtual* budgets, from the budget to what store-all
/// needs, copies are laid over each of these orders within the true budget (`copies::lay_copies`), and the best ones are worked
/// on
/// (`copies::copy_search`). The ends of the scan are recomputation alone and copies alone. Other scans are of budgets that vary
/// with the moment, by what copies can have moved by then (`copies::virtual_problem`), and of operations that run early, so that
/// copies have more time before most memory is needed (`copies::early_order`). Proves `bound::copy_bound`, or
/// `tiers::tier_bound`, besides. Of a problem that is not plain, recomputation is planned for what stays on the device
/// (`copies::without_host`).
///
/// With `limits.threads` of 2 or more, orders are planned and worked on side by side; which schedule is found then depends on
/// timing.
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
    std::size_t scan = 20;            ///< virtual budgets that do not vary, >= 1; of others half as many
    std::size_t inner = 3;            ///< of them, the most promising, are planned for by Inner
    std::size_t starts = 10;          ///< orders that are worked on, the best first, >= 1
    std::size_t search = 600'000;     ///< each for `order::patience_for` that many rounds without an improvement
    std::size_t idle = 12;            ///< so many times without an improvement and a thread's search ends; 0: none
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
    if (auto why = p.plain() ? std::string() : copies::unplannable(p); !why.empty()) {
      r.status = status::not_applicable;
      r.reason = std::move(why);
      return r;
    }
    if (incumbent all(p, budget); p.plain() && all.offer(needed)) {
      all.put_into(r);
      return r;
    }
    scan now{p.plain() ? p.with_copies({}) : copies::without_host(p), budget, 0, m, {p, budget}, {}, {}, 0, {}};
    now.most = measure_order(now.plain, needed).peak;
    if (!p.plain()) now.least = std::min(now.most, bounds_without_search(now.plain).budget);
    now.offer(needed, 0, now.most);
    prove_bound(p, budget, r, [&] { return m.stopped(); });
    now.bound = r.bound;
    if (options_.start) {
      const auto order = compute_order(*options_.start);
      now.offer(order, 0, measure_order(now.plain, order).peak);
    }
    if (!now.done()) look(now, p);
    if (!p.plain()) reorder(now, needed);
    now.best.put_into(r);
    return r;
  }

 private:
  /// An order, and what it was planned for.
  struct start {
    copies::copied_order order;
    std::size_t kind;  ///< of `scan::problems`
    bytes_t budget;    ///< virtual
    double seconds;    ///< with copies
  };
  struct scan {
    const problem plain;  ///< the same without copies
    bytes_t least, most;  ///< virtual budgets: from the true one, or what the device needs of it, up to what store-all needs
    monitor& m;
    copies::copy_incumbent best;
    std::vector<copies::virtual_problem> problems;  ///< first `plain` as it is
    std::vector<start> starts;
    double bound;
    std::mutex lock;  ///< of `starts`

    bool done() const { return m.stopped() || best.seconds() * (1 - m.limits().gap) <= bound; }
    /// @param order of operations of `plain`
    void offer(std::vector<operation_id> order, std::size_t kind, bytes_t virtual_budget) {
      const auto before = best.seconds();
      auto laid = best.offer({order});
      while (laid) {
        auto sooner = copies::early_end(plain, order, *laid);
        auto better = sooner.empty() ? std::nullopt : best.offer({sooner});
        if (!better || !(better->seconds < laid->seconds)) break;
        order = std::move(sooner), laid = std::move(better);
      }
      if (best.seconds() < before) best.report(m, "scan", bound);
      const std::lock_guard guard(lock);
      if (laid) starts.push_back({{std::move(order)}, kind, virtual_budget, laid->seconds});
    }
    void offer(const result& planned, std::size_t kind, bytes_t virtual_budget) {
      if (planned.found()) offer(problems[kind].unwrap(compute_order(planned.schedule)).order, kind, virtual_budget);
    }
    void rank() {
      std::stable_sort(starts.begin(), starts.end(), [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
    }
    /// Does `work(i)` for all i < count, on the threads of the limits, or as many as there are.
    template <class F>
    void each(std::size_t count, F&& work) {
      std::atomic<std::size_t> next = 0;
      const auto run = [&] {
        for (std::size_t i; (i = next++) < count;) work(i);
      };
      std::vector<std::future<void>> others;
      for (unsigned i = 1; i < m.limits().threads && i < count; ++i)
        if (auto other = beside(run); other.valid()) others.push_back(std::move(other));
      run();
      for (auto& x : others) x.get();
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
    if (!p.plain() && !copies::unplannable(p).empty()) return slower.solve(p, budget, part);
    prove_bound(p, budget, proven, [&] { return m.stopped(); });
    auto r = slower.solve(with_slower_links(p, options_.rate_share), budget, part);
    r.bound = proven.bound;
    return r;
  }

  /// Plans recomputation quickly for virtual budgets, and offers the orders.
  static void sweep(scan& now, std::size_t kind, const std::vector<bytes_t>& budgets) {
    monitor part(now.m, kind == 0 ? 0.2 : 0.4, [](const progress&) { return control::go_on; });
    const auto planned =
        min_cut({.bound = false, .repairs = 10'000, .rounds = 0}).sweep(now.problems[kind].problem(), budgets, part);
    for (std::size_t i = 0; i < budgets.size() && !now.m.stopped(); ++i) now.offer(planned[i], kind, budgets[i]);
  }

  /// Budgets that rise by what can have left by then, and fall by what still has to come back.
  static std::vector<bytes_t> moving(const scan& now, const problem& p) {
    const auto far = p.plain() ? p.host() : copies::tier_chain(p)[1];
    bytes_t all = 0;
    for (const auto& v : now.plain.values()) all += v.bytes;
    const auto most = static_cast<double>(std::min(2 * (now.most - now.least), (max_bytes - all) / 2));  // ballast comes on top
    const double up = p.link(device_tier, far)->rate, down = p.link(far, device_tier)->rate;
    const double seconds = measure_order(now.plain, needed_operations(now.plain)).seconds;
    const int parts = 64;
    std::vector<bytes_t> budgets;
    for (int k = 0; k < parts; ++k)
      budgets.push_back(now.least +
                        static_cast<bytes_t>(std::clamp(std::min(up * k, down * (parts - 1 - k)) / parts * seconds, 0.0, most)));
    return budgets;
  }

  void look(scan& now, const problem& p) const {
    const auto needed = needed_operations(now.plain);
    const auto with_copies = moving(now, p);
    now.problems.emplace_back(now.plain, needed, std::vector{now.least});
    now.problems.emplace_back(now.plain, needed, with_copies);
    if (const auto heaviest = bound::retention_cuts(now.plain, now.least, 8); !heaviest.empty())
      if (const auto early = copies::early_order(now.plain, heaviest.front()->tau()); early != needed)
        now.problems.emplace_back(now.plain, early, with_copies);

    const auto count = [&](std::size_t kind) { return static_cast<bytes_t>(kind == 0 ? options_.scan : options_.scan / 2 + 1); };
    now.each(now.problems.size(), [&](std::size_t i) {
      const auto kind = now.problems.size() - 1 - i;  // what mostly pays first
      const auto top = now.problems[kind].budget();
      const auto range = kind == 0 ? now.most - now.least : std::min(now.most, top) - now.least;
      const auto last = kind == 0 ? now.most : top + range / 3;
      const auto n = count(kind);
      std::vector<bytes_t> budgets;
      for (bytes_t k = n; k > 0; --k) budgets.push_back(last - range / n * k);
      sweep(now, kind, budgets);
    });
    now.rank();
    if (now.starts.empty()) now.starts.push_back({{}, 0, now.least, 0});
    const auto promising = now.starts.front();
    std::vector<bytes_t> nearby;
    for (bytes_t i = -3; i <= 3; ++i)
      if (const auto budget = promising.budget + i * (now.most - now.least) / count(promising.kind) / 4;
          i != 0 && budget >= now.least)
        nearby.push_back(budget);
    if (!now.done()) sweep(now, promising.kind, nearby);

    now.rank();
    const std::vector<start> best(now.starts.begin(),
                                  now.starts.begin() + static_cast<std::ptrdiff_t>(std::min(options_.inner, now.starts.size())));
    now.each(best.size(), [&](std::size_t i) {
      if (!now.done()) plan(now, best[i]);
    });
    std::erase_if(now.starts, [](const auto& s) { return s.order.order.empty(); });
    now.rank();
    if (!now.starts.empty()) work_on(now);
  }
  /// Where nothing fits, operations may at other places: what cannot move, or a full tier, depends on when it is read.
  static void reorder(scan& now, const std::vector<operation_id>& needed) {
    order::destroy_repair n(now.plain, now.most, now.m.limits().seed);
    n.load(needed);
    for (int tries = 0; tries < 200 && !std::isfinite(now.best.seconds()) && !now.m.stopped(); ++tries) {
      n.shift();
      n.commit();
      now.offer(n.order(), 0, now.most);
    }
  }
  /// Has Inner plan.
  void plan(scan& now, const start& s) const {
    monitor part(now.m, 0.1, [&](const progress& x) {
      if (x.schedule) now.offer(now.problems[s.kind].unwrap(compute_order(*x.schedule)).order, s.kind, s.budget);
      return now.done() ? control::stop : control::go_on;
    });
    now.offer(inner_.solve(now.problems[s.kind].problem(), s.budget, part), s.kind, s.budget);
  }
  /// Works on the best order and the others in turn, on each thread.
  void work_on(scan& now) const {
    auto& starts = now.starts;
    starts.resize(std::min(starts.size(), options_.starts));
    auto fastest = starts.front();
    if (!now.done()) now.best.try_less();
    std::size_t next = 0, idle = 0;
    std::mutex lock;
    now.each(now.m.limits().threads, [&](std::size_t) {
      for (;;) {
        start from;
        std::size_t stream = 0;
        {
          const std::lock_guard guard(lock);
          if (idle >= options_.idle * now.m.limits().threads || now.done()) return;
          stream = next++;
          from = stream % 2 == 1 ? starts[stream / 2 % starts.size()] : fastest;
          if (stream % 2 == 0) from.order = now.best.order();
        }
        const auto before = now.best.seconds();  // other threads may have better ones by the end
        monitor part(now.m, 0.5);
        copies::copy_search(now.problems[from.kind], from.order, from.budget, now.best, part,
                            {.patience = order::patience_for(now.plain, options_.search), .stream = stream}, now.bound);
        if (now.best.seconds() < before && !now.m.stopped()) now.best.try_less();
        const std::lock_guard guard(lock);
        if (now.best.seconds() < before) fastest = from;
        idle = now.best.seconds() < before * (1 - 1e-6) ? 0 : idle + 1;
      }
    });
  }

  Inner inner_;
  options options_;
};

}  // namespace remat
