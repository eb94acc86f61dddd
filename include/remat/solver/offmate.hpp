// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recomputation and copies to the host, planned together. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/sample_cuts.hpp>
#include <remat/copies/copy_search.hpp>
#include <remat/copies/virtual_problem.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/slower_links.hpp>
#include <remat/core/solve.hpp>
#include <remat/core/try_async.hpp>
#include <remat/order/destroy_repair.hpp>
#include <remat/solver/cheap_orders.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/prove_bound.hpp>

namespace remat {

/// Plans recomputation and copies to the host together, for problems of any shape that allow copies, and for those on several
/// tiers (`copies::why_unplannable` says which it cannot plan). A plain problem without copies is left to Inner.
///
/// Copies make the budget look larger. So recomputation alone is planned for *virtual* budgets, from the budget to the need of
/// store-all. Copies are laid over each of these orders within the true budget (`copies::schedule_copies`), and the best are
/// improved by `copies::copy_search`. The two ends of this scan are recomputation alone and copies alone.
///
/// Other scans use budgets that vary with the moment, by a share of the bytes that copies can have moved by then
/// (`copies::virtual_problem`). Some also run operations early, which gives copies more time before the heaviest moment
/// (`copies::early_order`). Proves `bound::copy_bound`, or `tiers::tier_bound`. On several tiers, recomputation is planned for
/// values that stay on the device (`copies::recomputation_only`).
///
/// With `limits.threads` of 2 or more, orders are planned and improved side by side; the schedule then depends on timing.
///
/// Links may be slower than their rates say. This costs most where a link is busy all the time. With a `rate_share` of 0.9, a
/// schedule still takes about as long at nine tenths of the rates, for a little more time at the full rates.
///
/// @tparam Inner plans recomputation for the most promising virtual budgets, after `min_cut` has planned for all of them
///
/// Complexity: that of `min_cut` and Inner for some virtual budgets, and of `search` rounds.
/// @code
/// auto r = remat::solve(p, budget, remat::offmate{}, {.seconds = 10});
/// @endcode
template <solver Inner = min_cut>
class offmate {
 public:
  struct options {
    std::size_t scan = 20;            ///< number of constant virtual budgets, >= 1; half as many in each of the four other scans
    std::size_t inner = 3;            ///< number of most promising virtual budgets that Inner plans for
    std::size_t starts = 10;          ///< number of orders to improve, the fastest ones, >= 1
    std::size_t effort = 600'000;     ///< effort of each `copies::copy_search`, for `order::patience_for`
    std::size_t idle = 12;            ///< searches per thread without an improvement after which the work ends; 0: no search
    std::optional<schedule> start{};  ///< a known schedule to start from; its copies are ignored
    double rate_share = 1;            ///< share of its rate that each link is planned with, in (0, 1]
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

  /// @throws any exception of Inner
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (p.plain() && !p.copies()) return inner_.solve(p, budget, m);
    if (options_.rate_share < 1) return solve_for_slower_links(p, budget, m);
    if (p.plain()) {
      if (auto all = store_all_if_it_fits(p, budget)) return *std::move(all);
    } else if (auto why = copies::why_unplannable(p); !why.empty()) {
      return refused(std::move(why));
    }
    result r;
    const auto needed = needed_operations(p);
    const auto plain = p.plain() ? p.with_copies({}) : copies::recomputation_only(p);
    scan_state state{plain, budget, 0, m, {p, budget, m.stop_check()}, options_.starts};
    offer_orders_without_copies(state);
    if (m.stopped() && (std::isfinite(state.best.seconds()) || needed.size() >= copies::copy_options::polled_every))
      return state.best.put_into(r), r;
    state.max_budget = measure_order(state.plain, needed).peak;
    if (!p.plain()) state.min_budget = std::min(state.max_budget, bounds_without_search(state.plain).budget);
    state.constant_budget = std::make_shared<const copies::virtual_problem>(state.plain, needed, std::vector{state.min_budget});
    state.offer(needed, state.constant_budget, state.max_budget);
    prove_bound(p, budget, r, m.stop_check());
    state.bound = r.bound;
    if (options_.start) {
      const auto order = compute_order(*options_.start);
      state.offer(order, state.constant_budget, measure_order(state.plain, order).peak);
    }
    if (!state.done()) scan_all(state);
    if (!p.plain()) reorder(state, needed);
    state.best.put_into(r);
    return r;
  }

 private:
  using virtual_pointer = std::shared_ptr<const copies::virtual_problem>;
  /// An order, and the virtual problem and budget that it was planned for.
  struct start {
    copies::order_with_departures order;
    virtual_pointer problem;
    bytes_t budget;  ///< virtual, bytes
    double seconds;  ///< time with copies, s
  };
  /// The time of the fastest order, s, if the virtual budgets count on `share` of the bytes that can be moved.
  struct point {
    double share, seconds;
  };
  static constexpr auto faster = [](const auto& a, const auto& b) { return a.seconds < b.seconds; };
  struct scan_state {
    const problem plain;             ///< the problem without copies
    bytes_t min_budget, max_budget;  ///< virtual budgets: the budget, or the least need of `plain`; the need of store-all
    monitor& m;
    copies::copy_incumbent best;
    std::size_t keep;                   ///< most starts
    virtual_pointer constant_budget{};  ///< `plain`, with a constant budget
    std::vector<start> starts{};        ///< the fastest first
    double bound = 0;
    std::mutex lock{};  ///< protects `starts`

    bool done() const { return m.stopped() || best.seconds() * (1 - m.limits().gap) <= bound; }
    /// Lays copies over an order of `plain`, and makes it a start.
    /// @return its time with copies, s; infinity if no copies can be laid
    double offer(std::vector<operation_id> order, const virtual_pointer& q, bytes_t virtual_budget) {
      const auto before = best.seconds();
      auto laid = best.offer({order});
      while (laid) {
        auto sooner = copies::early_end(plain, order, *laid);
        auto better = sooner.empty() ? std::nullopt : best.offer({sooner});
        if (!better || !(better->seconds < laid->seconds)) break;
        order = std::move(sooner), laid = std::move(better);
      }
      if (best.seconds() < before) best.report(m, "scan", bound);
      if (!laid) return std::numeric_limits<double>::infinity();
      const std::lock_guard guard(lock);
      const auto place = std::find_if(starts.begin(), starts.end(), [&](const start& s) { return laid->seconds < s.seconds; });
      starts.insert(place, {{std::move(order)}, q, virtual_budget, laid->seconds});
      if (starts.size() > keep) starts.pop_back();
      return laid->seconds;
    }
    double offer(const schedule& planned, const virtual_pointer& q, bytes_t virtual_budget) {
      return offer(q->unwrap(compute_order(planned)).order, q, virtual_budget);
    }
    /// The time of the fastest start, s.
    double fastest() {
      const std::lock_guard guard(lock);
      return starts.empty() ? std::numeric_limits<double>::infinity() : starts.front().seconds;
    }
    /// Calls `work(i)` for all i < count, on `limits.threads` threads or as many as the system has.
    template <class F>
    void parallel_for(std::size_t count, F&& work) {
      std::atomic<std::size_t> next = 0;
      const auto run = [&] {
        for (std::size_t i; (i = next++) < count;) work(i);
      };
      std::vector<std::future<void>> others;
      for (unsigned i = 1; i < m.limits().threads && i < count; ++i)
        if (auto other = try_async(run); other.valid()) others.push_back(std::move(other));
      run();
      for (auto& x : others) x.get();
    }
  };

  /// Offers cheap orders without copies as soon as they are found, because laying copies takes several times as long.
  static void offer_orders_without_copies(scan_state& state) {
    incumbent first_orders(state.plain, state.best.budget());
    monitor part(state.m, 0.5, [&](const progress&) {
      if (state.best.offer_without_copies(first_orders.order())) state.best.report(state.m, "without copies", state.bound);
      return control::go_on;
    });
    offer_cheap_orders(state.plain, first_orders, part);
  }
  /// Plans for slower links. Bounds for slower links do not hold for `p`, so `p` gets its own.
  result solve_for_slower_links(const problem& p, bytes_t budget, monitor& m) const {
    auto slower = *this;
    slower.options_.rate_share = 1;
    monitor part(m, 1, [tell = report_to(m)](progress x) {
      x.bound = 0;
      return tell(x);
    });
    result proven;
    if (!p.plain() && !copies::why_unplannable(p).empty()) return slower.solve(p, budget, part);
    prove_bound(p, budget, proven, m.stop_check());
    auto r = slower.solve(with_slower_links(p, options_.rate_share), budget, part);
    r.bound = proven.bound;
    return r;
  }

  /// Plans recomputation for virtual budgets by a quick `min_cut`, and offers the orders.
  /// @param part share of the time that is left
  /// @return the virtual budget of the fastest order, bytes, and its time, s; infinity if there is none
  static std::pair<bytes_t, double> sweep(scan_state& state, const virtual_pointer& q, const std::vector<bytes_t>& budgets,
                                          double part) {
    monitor share_of_time(state.m, part, [](const progress&) { return control::go_on; });
    const auto planned = min_cut({.bound = false, .repairs = 10'000, .effort = 0}).sweep(q->problem(), budgets, share_of_time);
    std::pair fastest{bytes_t{0}, std::numeric_limits<double>::infinity()};
    for (std::size_t i = 0; i < budgets.size() && !state.m.stopped(); ++i) {
      const auto seconds = planned[i].found() ? state.offer(planned[i].schedule, q, budgets[i]) : fastest.second;
      if (seconds < fastest.second) fastest = {budgets[i], seconds};
    }
    return fastest;
  }

  /// Plans for `count` virtual budgets in the `range` below `top`, then for some budgets near the best.
  static void scan_range(scan_state& state, const virtual_pointer& q, bytes_t top, bytes_t range, bytes_t count) {
    if (state.done()) return;
    std::vector<bytes_t> budgets;
    for (bytes_t k = count; k > 0; --k) budgets.push_back(std::max(state.min_budget, top - range / count * k));
    const auto [best, seconds] = sweep(state, q, budgets, 0.2);
    budgets.clear();
    for (bytes_t i = -3; i <= 3; ++i)
      if (const auto near = best + i * (state.max_budget - state.min_budget) / count / 4; i != 0 && near >= state.min_budget)
        budgets.push_back(near);
    if (!state.done() && std::isfinite(seconds)) sweep(state, q, budgets, 0.1);
  }

  /// Virtual budgets over the step: they rise with the bytes that can have left, and fall with the bytes still to come back.
  /// @param share of these bytes to count on
  static std::vector<bytes_t> varying_budgets(const scan_state& state, double share) {
    const auto& p = state.best.problem();
    const auto chain = p.plain() ? std::vector{device_tier, p.host()} : copies::tier_chain(p);
    const auto bytes_passed = [&](double seconds, bool out) {  // bytes in that time; a full tier passes them on
      double least = std::numeric_limits<double>::infinity(), room = 0;
      for (std::size_t i = 1; i < chain.size(); ++i) {
        least = std::min(least, room + seconds * p.link(chain[out ? i - 1 : i], chain[out ? i : i - 1])->rate);
        room += static_cast<double>(p.capacity(chain[i]));
      }
      return least;
    };
    bytes_t all = 0;
    for (const auto& v : state.plain.values()) all += v.bytes;
    const auto limit =
        static_cast<double>(std::min(2 * (state.max_budget - state.min_budget), (max_bytes - all) / 2));  // with ballast on top
    const double seconds = measure_order(state.plain, needed_operations(state.plain)).seconds;
    std::vector<bytes_t> budgets;
    for (int k = 0, parts = 64; k < parts; ++k) {
      const double moved =
          std::min(bytes_passed(seconds * k / parts, true), bytes_passed(seconds * (parts - 1 - k) / parts, false));
      budgets.push_back(state.best.budget() + static_cast<bytes_t>(std::clamp(share * moved, 0.0, limit)));
    }
    return budgets;
  }
  /// Plans for varying budgets that count on all bytes that can be moved, shifted up and down by several amounts.
  void scan_shifted(scan_state& state, const std::vector<operation_id>& order) const {
    if (state.done()) return;
    const auto q = std::make_shared<const copies::virtual_problem>(state.plain, order, varying_budgets(state, 1));
    const auto range = std::min(state.max_budget, q->budget()) - state.min_budget;
    scan_range(state, q, q->budget() + range / 3, range, static_cast<bytes_t>(options_.scan / 2 + 1));
  }
  /// Plans for varying budgets. With more copies there is less to recompute, but at some point the device waits for them. So the
  /// time first falls with the share that is moved, and then rises. Looks for the least time where the lines through the points
  /// on both sides meet.
  /// @param early_once operations that `order` lists early run once
  void scan_varying(scan_state& state, const std::vector<operation_id>& order, bool early_once) const {
    std::vector<point> known;
    const auto try_share = [&](double share) {
      const auto q =
          std::make_shared<const copies::virtual_problem>(state.plain, order, varying_budgets(state, share), early_once);
      const auto seconds = sweep(state, q, {q->budget()}, 0.1).second;
      const auto place = std::find_if(known.begin(), known.end(), [&](const point& x) { return x.share > share; });
      known.insert(place, {share, seconds});
    };
    for (const double share : {0.75, 1., 0.5, 1.25, 0.25})
      if (!state.done()) try_share(share);
    while (!state.done() && known.size() < options_.scan / 2) {
      const auto next = next_point(known);
      if (!(next.seconds < state.fastest() * (1 - 1e-3))) return;  // `copies::copy_search` gains as much
      try_share(next.share);
    }
  }
  /// Estimates the least time beside the lowest point. For points of a convex function, it is where the lines through the points
  /// on both sides meet. Otherwise, and at the ends, it is halfway to the next point, with time 0 (unknown).
  /// @param known two or more points, by their shares
  static point next_point(const std::vector<point>& known) {
    const auto slope = [&](std::size_t i) {
      return (known[i].seconds - known[i - 1].seconds) / (known[i].share - known[i - 1].share);
    };
    const auto best = static_cast<std::size_t>(std::min_element(known.begin(), known.end(), faster) - known.begin());
    point least{0, std::numeric_limits<double>::infinity()};
    for (auto i = std::max<std::size_t>(best, 1); i <= best + 1 && i < known.size(); ++i) {
      const auto &left = known[i - 1], &right = known[i];
      const double width = right.share - left.share;
      point next{left.share + width / 2, 0};
      if (i > 1 && i + 1 < known.size() && slope(i - 1) < slope(i + 1) && std::isfinite(slope(i + 1) - slope(i - 1))) {
        const double falls = slope(i - 1), rises = slope(i + 1);
        const double meet = (right.seconds - left.seconds - rises * width) / (falls - rises);
        const double step = std::clamp(meet, 0.2 * width, 0.8 * width);
        next = {left.share + step, left.seconds + falls * step};
      }
      least = std::min(least, next, faster);
    }
    return least;
  }

  void scan_all(scan_state& state) const {
    const auto needed = needed_operations(state.plain);
    std::vector<std::function<void()>> scans = {[&] { scan_shifted(state, needed); }, [&] { scan_varying(state, needed, false); },
                                                [&] {
                                                  scan_range(state, state.constant_budget, state.max_budget,
                                                             state.max_budget - state.min_budget,
                                                             static_cast<bytes_t>(options_.scan));
                                                }};
    if (const auto heaviest = bound::most_demanding_cuts(state.plain, state.min_budget, 8, state.m.stop_check());
        !heaviest.empty())
      if (const auto early = copies::early_order(state.plain, heaviest.front()->tau()); early != needed) {
        scans.insert(scans.begin(), [&state, this, early] { scan_shifted(state, early); });
        scans.insert(scans.begin(), [&state, this, early] { scan_varying(state, early, true); });
      }
    state.parallel_for(scans.size(), [&](std::size_t i) { scans[i](); });
    if (state.starts.empty()) state.starts.push_back({{}, state.constant_budget, state.min_budget, 0});

    const std::vector<start> best(
        state.starts.begin(), state.starts.begin() + static_cast<std::ptrdiff_t>(std::min(options_.inner, state.starts.size())));
    state.parallel_for(best.size(), [&](std::size_t i) {
      if (!state.done()) plan(state, best[i]);
    });
    std::erase_if(state.starts, [](const auto& s) { return s.order.order.empty(); });
    if (!state.starts.empty()) improve_orders(state);
  }
  /// If nothing fits, moves operations: the memory for values that cannot move, or for a full tier, depends on their readers.
  static void reorder(scan_state& state, const std::vector<operation_id>& needed) {
    if (std::isfinite(state.best.seconds()) || state.m.stopped()) return;
    order::destroy_repair candidate(state.plain, state.max_budget, state.m.limits().seed);
    candidate.load(needed);
    for (int tries = 0; tries < 200 && !std::isfinite(state.best.seconds()) && !state.m.stopped(); ++tries) {
      candidate.shift();
      candidate.commit();
      state.offer(candidate.order(), state.constant_budget, state.max_budget);
    }
  }
  /// Plans the virtual problem of a start by Inner, and offers the schedules.
  void plan(scan_state& state, const start& s) const {
    monitor part(state.m, 0.1, [&](const progress& x) {
      if (x.schedule) state.offer(*x.schedule, s.problem, s.budget);
      return state.done() ? control::stop : control::go_on;
    });
    const auto r = inner_.solve(s.problem->problem(), s.budget, part);
    if (r.found()) state.offer(r.schedule, s.problem, s.budget);
  }
  /// Improves the best order and the other starts in turn, on each thread.
  void improve_orders(scan_state& state) const {
    const auto& starts = state.starts;
    auto fastest = starts.front();
    if (!state.done()) state.best.try_smaller_budgets();
    std::size_t next = 0, idle = 0;
    std::mutex lock;
    state.parallel_for(state.m.limits().threads, [&](std::size_t) {
      for (;;) {
        start from;
        std::size_t stream = 0;
        {
          const std::lock_guard guard(lock);
          if (idle >= options_.idle * state.m.limits().threads || state.done()) return;
          stream = next++;
          from = stream % 2 == 1 ? starts[stream / 2 % starts.size()] : fastest;
          if (stream % 2 == 0) from.order = state.best.order();
        }
        const auto before = state.best.seconds();  // other threads may lower it meanwhile
        monitor part(state.m, 0.5);
        copies::copy_search(*from.problem, from.order, from.budget, state.best, part,
                            {.patience = order::patience_for(state.plain, options_.effort), .stream = stream}, state.bound);
        if (state.best.seconds() < before && !state.m.stopped()) state.best.try_smaller_budgets();
        const std::lock_guard guard(lock);
        if (state.best.seconds() < before) fastest = from;
        idle = state.best.seconds() < before * (1 - 1e-6) ? 0 : idle + 1;
      }
    });
  }

  Inner inner_;
  options options_;
};

}  // namespace remat
