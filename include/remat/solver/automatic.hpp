// SPDX-License-Identifier: Apache-2.0
/// @file
/// The default solver. Needs Boost.Graph. To use a MILP library, include `solver/automatic_milp.hpp`.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/core/try_async.hpp>
#include <remat/order/exact_order_search.hpp>
#include <remat/order/local_search.hpp>
#include <remat/solver/cheap_orders.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/offmate.hpp>

namespace remat {

/// Template argument of `automatic` for use without a MILP library.
struct no_backend {};

/// The parts of `automatic` that need a MILP backend. `solver/automatic_milp.hpp` defines them, so that programs without a
/// backend need no Eigen.
template <class B>
struct automatic_milp;

/// The default solver: combines several methods, chosen by the size of the problem.
///
/// Each method starts from the best schedule so far. The search ends when a bound is met within `limits.gap`, when no method
/// finds an improvement, or when time is up. Every improvement is reported at once. The methods are:
/// - cheap orders (`offer_cheap_orders`), which have a schedule of most problems within a second;
/// - minimum cuts (`min_cut`), and planning in parts for large problems (`hierarchical`);
/// - a search through all orders of a small problem (`order::exact_order_search`);
/// - local search around the best orders;
/// - with a MILP library, the staged MILP for the schedule, and MILPs over several moments for the bound. The solutions of the
///   latter are also orders to search around.
///
/// With `limits.threads` of 2 or more, schedule and bound are improved at the same time; the schedule then depends on timing.
///
/// If the problem allows copies to the host or has several tiers, `automatic` becomes the `Inner` of an `offmate`. It ends when
/// time is up or after a long search without an improvement. With a MILP library, `proving` then improves the bound.
///
/// @tparam B the MILP backend, which needs `solver/automatic_milp.hpp`, or `no_backend`: then no MILP is solved
///
/// Complexity: that of `min_cut`; the other methods use the time that is left.
/// @code
/// auto r = remat::solve(p, budget, remat::automatic<>{}, {.seconds = 10, .gap = 0.01});
/// if (r.found()) std::cout << r.seconds << " s, within " << 100 * r.gap() << " % of the optimum\n";
/// @endcode
template <class B = no_backend>
class automatic {
  static constexpr bool with_milp = !std::is_same_v<B, no_backend>;
  static_assert(
      !with_milp || requires { sizeof(automatic_milp<B>); },
      "automatic<B> of a MILP backend B needs #include <remat/solver/automatic_milp.hpp>");

 public:
  struct options {
    std::size_t small_operations = 400;       ///< larger problems are planned in parts as well
    std::size_t moment_operations = 1000;     ///< larger problems get no bound from several moments
    std::size_t staged_operations = 250;      ///< larger problems are not tried with a staged MILP
    order::local_search_options search = {};  ///< options of the local search
    std::optional<schedule> start = {};       ///< a known schedule to start from; its copies are ignored
  };

  automatic() : automatic(options{}) {}
  /// @throws bad_option if the options of the local search are out of range
  explicit automatic(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) { o.search.validate(); }

  std::string name() const { return "automatic"; }
  bool plans_tiers() const { return true; }
  automatic with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  /// @throws any exception of the backend
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (p.copies() || !p.plain()) {
      const options without_start{
          options_.small_operations, options_.moment_operations, options_.staged_operations, options_.search, {}};
      offmate<automatic> with_copies(automatic(without_start, backend_), {.idle = 16, .start = options_.start});
      if constexpr (with_milp)
        return automatic_milp<B>::prove_copies(std::move(with_copies), backend_, options_.moment_operations, p, budget, m);
      else
        return with_copies.solve(p, budget, m);
    }
    search state(p, budget, m);
    if (state.best.offer(state.needed)) return state.answer();
    if (options_.start) {
      result known;
      known.status = status::feasible;
      known.schedule = *options_.start;
      state.record(known);
    }
    state.remember(state.within(never, [&](monitor& first) { return offer_cheap_orders(p, state.best, first); }));
    state.record(result{});
    const auto cuts = state.run(min_cut({.repairs = 10'000, .effort = 0, .start = options_.start}), never);
    state.record(cuts);
    if (search_exactly(state)) return state.answer();
    const auto start = cuts.found() ? compute_order(cuts.schedule) : state.best.found() ? state.best.order() : state.needed;
    search_around(state, start, patience(p));
    if (state.needed.size() > options_.small_operations)
      state.record(state.run(hierarchical<>(cheap_default<min_cut>(), {}, {.bound = false}), never));
    if (state.done()) return state.answer();
    if constexpr (with_milp) {
      if (state.needed.size() <= options_.moment_operations) {
        std::future<bound::time_bound> proof;
        if (m.limits().threads > 1) proof = try_async([&] { return prove(state, never); });
        if (proof.valid()) {
          improve(state, start, [&] { return proof.wait_for(std::chrono::seconds(0)) != std::future_status::ready; });
          state.record(proof.get());
        } else {
          for (int i = 0; i < 3; ++i) improve_once(state, start, false);
          state.record(prove(state, state.remaining() / 2));
        }
      }
    }
    improve(state, start);
    return state.answer();
  }

 private:
  /// State of one search: the best schedule, bounds and suggested orders. A second thread that proves the bound may call
  /// `within`, `suggest` and `seconds`, and report progress. The other members are for the main thread.
  class search {
   public:
    search(const problem& problem, bytes_t bytes, monitor& m)
        : p(problem), budget(bytes), best(p, budget), outer_(m), monitor_(m, 1) {}

    const problem& p;
    const bytes_t budget;
    const std::vector<operation_id> needed = needed_operations(p);
    incumbent best;
    std::uint64_t stream = 0;  ///< random stream of the next local search

    /// True if the search has to end: it was stopped, or the problem is infeasible.
    bool done() const { return monitor_.stopped() || answer_.status == status::infeasible; }
    /// Calls `work` with a monitor for at most `seconds` of the time that is left.
    template <class F>
    auto within(double seconds, F&& work) {
      const double left = monitor_.remaining();
      monitor part(monitor_, std::isfinite(left) && seconds < left ? seconds / left : 1,
                   [this](const progress& x) { return on_progress(x, false); });
      return work(part);
    }
    template <solver S>
    result run(const S& s, double seconds) {
      if (done()) return {};
      return within(seconds, [&](monitor& m) { return s.solve(p, budget, m); });
    }
    void record(const result& answer) {
      if (answer.found()) best.offer(compute_order(answer.schedule));
      answer_.budget_bound = std::max(answer_.budget_bound, answer.budget_bound);
      if (!answer.scope.empty()) answer_.scope = answer.scope, answer_.scope_bound = answer.scope_bound;
      if (answer.status == status::infeasible && !best.found()) answer_.status = status::infeasible;
      on_progress({.stage = "automatic", .best = best.seconds(), .bound = answer.bound}, true);
    }
    void record(const bound::time_bound& proven) {
      result r;
      r.budget_bound = proven.budget;
      if (std::isfinite(proven.seconds))
        r.bound = proven.seconds;
      else
        r.status = status::infeasible;
      record(r);
    }
    /// Stores the peak of `order` as a budget for which a schedule is known.
    void remember(const std::vector<operation_id>& order) {
      try {
        answer_.smallest_budget = as_result(p, with_drops(p, order)).peak;
      } catch (const bad_schedule&) {  // `order` recomputes a once-only operation
      }
    }
    /// Stores an order to search around; it need not fit the budget.
    void suggest(std::vector<operation_id> order) {
      const std::lock_guard guard(lock_);
      suggestions_.push_back(std::move(order));
    }
    /// Removes and returns the last suggested order; nothing if there is none.
    std::optional<std::vector<operation_id>> next_suggestion() {
      const std::lock_guard guard(lock_);
      if (suggestions_.empty()) return std::nullopt;
      auto last = std::move(suggestions_.back());
      suggestions_.pop_back();
      return last;
    }
    double remaining() const { return monitor_.remaining(); }
    double bound() const { return bound_; }
    double seconds() const { return seconds_; }
    result answer() {
      answer_.bound = bound_;
      best.put_into(answer_);
      return std::move(answer_);
    }

   private:
    control on_progress(progress x, bool from_best_order) {
      const std::lock_guard guard(lock_);
      bound_ = x.bound = std::max(x.bound, bound_.load());
      if (from_best_order) seconds_ = std::min(x.best, seconds_.load());
      if (seconds_ < x.best) x.best = seconds_, x.schedule = nullptr;
      outer_.report(std::move(x));
      if (seconds_ * (1 - outer_.limits().gap) <= bound_) monitor_.request_stop();
      return control::go_on;
    }

    monitor& outer_;
    monitor monitor_;
    std::mutex lock_;
    std::atomic<double> seconds_ = std::numeric_limits<double>::infinity(), bound_ = 0;
    std::vector<std::vector<operation_id>> suggestions_;
    result answer_;
  };

  /// Searches through all orders of a small problem: for any schedule if none is known yet, then for the fastest.
  /// @return true if the search ended: the best schedule is proven optimal, or the problem infeasible
  static bool search_exactly(search& state) {
    constexpr std::size_t sets = 300'000;  // about half a second
    if (state.done() || state.needed.size() > order::exact_order_search::max_size ||
        !order::exact_order_search::supports(state.p))
      return false;
    order::exact_order_search all(state.p, state.budget);
    order::exact_order_search::answer known;
    const auto record = [&] {
      if (known.order && state.best.offer(*known.order)) state.record(result{});
      state.record(bound::time_bound{known.bound, 0});
    };
    state.within(state.remaining() / 2, [&](monitor& m) {
      const auto stop = m.stop_check();
      if (!state.best.found()) known = all.any(sets, stop), record();
      if (!state.done()) known = all.fastest(state.best.seconds(), sets, stop), record();
    });
    return known.complete;
  }
  /// Improves the bound by MILPs over several moments. The orders in their solutions become suggestions.
  bound::time_bound prove(search& state, double seconds) const {
    return state.within(seconds, [&](monitor& m) {
      const auto proven =
          automatic_milp<B>::bound_time(backend_, state.p, state.budget, m, [&](std::optional<std::vector<operation_id>> order) {
            if (order) state.suggest(std::move(*order));
            return state.seconds();
          });
      if (std::isfinite(proven.seconds)) m.report({.stage = "moments", .bound = proven.seconds});
      return proven;
    });
  }
  /// Improves the schedule by local search, until 4 * `patience` rounds bring no improvement and `proving` returns false. The
  /// staged MILP takes much of the time that is left, so it runs only after `patience` rounds without an improvement. On one
  /// thread and without MILPs, a longer search continues where a shorter one ends.
  void improve(search& state, const std::vector<operation_id>& start, const std::function<bool()>& proving = {}) const {
    bool staged = state.p.operations().size() > options_.staged_operations, faster = false;
    for (std::size_t idle = 0; !state.done() && (idle < 4 * options_.search.patience || (proving && proving()));) {
      faster = improve_once(state, start, faster);
      idle = faster ? 0 : idle + patience(state.p);
      if (idle >= options_.search.patience && !std::exchange(staged, true)) run_staged(state);
    }
  }
  static std::size_t patience(const problem& p) { return order::patience_for(p, 800'000); }
  /// Searches around each suggested order, then around the best order. In a small problem, every other call searches from `start`
  /// instead if the last call found nothing (`was_faster` is false).
  /// @return true if it found a faster schedule
  bool improve_once(search& state, const std::vector<operation_id>& start, bool was_faster) const {
    while (auto order = state.next_suggestion())
      search_around(state, std::move(*order), std::min<std::size_t>(patience(state.p), 300));
    const bool from_best = was_faster || state.stream % 2 == 1 || state.p.operations().size() > options_.small_operations;
    return search_around(state, from_best && state.best.found() ? state.best.order() : start, patience(state.p));
  }
  /// Searches around an order, which need not fit the budget, until `patience` rounds bring no improvement.
  /// @return true if it found the fastest schedule so far
  bool search_around(search& state, std::vector<operation_id> order, std::size_t patience) const {
    if (state.done()) return false;
    incumbent local_best(state.p, state.budget);
    auto o = options_.search;
    o.patience = patience;
    o.stream = state.stream++;
    state.within(never, [&](monitor& m) { order::local_search(state.p, std::move(order), local_best, m, o, state.bound()); });
    if (!local_best.found() || !state.best.offer(local_best.order())) return false;
    state.record(result{});
    return true;
  }

  void run_staged(search& state) const {
    if constexpr (with_milp) {
      std::optional<schedule> start;
      if (state.best.found()) start = with_drops(state.p, state.best.order());
      try {
        state.record(state.run(automatic_milp<B>::staged(backend_, std::move(start)), state.remaining() * 0.4));
      } catch (const too_large&) {  // few operations, but too many values for the model: skip it
      }
    }
  }

  static constexpr double never = std::numeric_limits<double>::infinity();
  options options_;
  B backend_;
};

}  // namespace remat
