// SPDX-License-Identifier: Apache-2.0
/// @file
/// The solver one gets without asking for one. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/multi_cut_bound.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/solver/improved.hpp>
#include <remat/solver/min_cut.hpp>

namespace remat {

/// For `automatic` without a MILP library.
struct no_backend {};

/// Runs what suits the size of the problem, each from the best schedule so far, until a bound is met within `limits.gap`, nothing
/// more is found or time is up: minimum cuts first, which take a fraction of a second, and parts; then local search and the
/// staged MILP for the schedule, and several moments at once for the bound, whose solutions are orders to search around. With
/// `limits.threads` of 2 or more, schedule and bound are worked on at the same time; which schedule is found then depends on
/// timing. Anytime: every improvement is reported. Copies to the host are not used.
///
/// @tparam B the MILP backend, or `no_backend`: bounds and schedules are then those of minimum cuts and local search
///
/// Complexity: that of `min_cut`; the rest takes what time there is.
/// @code
/// auto r = remat::solve(p, budget, remat::automatic<remat::highs::backend>{}, {.seconds = 10, .gap = 0.01});
/// if (r.found()) std::cout << r.seconds << " s, at most " << 100 * r.gap() << " % above the optimum\n";
/// @endcode
template <class B = no_backend>
class automatic {
 public:
  struct options {
    std::size_t small_operations = 400;       ///< larger problems are planned in parts as well
    std::size_t moment_operations = 1000;     ///< larger problems do without the bound from several moments
    std::size_t staged_operations = 250;      ///< larger problems do without the staged MILP
    order::local_search_options search = {};  ///< of the local search
    std::optional<schedule> start = {};       ///< a schedule that is known; of its copies nothing is taken
  };

  automatic() : automatic(options{}) {}
  /// @throws bad_option if the options of the local search are out of range
  explicit automatic(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) { o.search.validate(); }

  std::string name() const { return "automatic"; }
  automatic with_start(schedule s) const {
    auto started = *this;
    started.options_.start = std::move(s);
    return started;
  }

  /// @throws what the backend throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    search now(p, budget, m);
    if (now.best.offer(now.needed)) return now.answer();
    if (options_.start) {
      result known;
      known.status = status::feasible;
      known.schedule = *options_.start;
      now.take(known);
    }
    const bool large = now.needed.size() > options_.small_operations;
    now.take(now.run(min_cut({.repairs = large ? 50'000u : 300'000u}), never));
    if (large) {
      improve_for(now, 2, 0);
      now.take(now.run(hierarchical<>(), 10));
    }
    if (now.done()) return now.answer();
    if constexpr (milp::backend<B>) {
      if (now.needed.size() <= options_.moment_operations) {
        if (m.limits().threads > 1) {
          auto proof = std::async(std::launch::async, [&] { return prove(now, never); });
          look(now, [&] { return proof.wait_for(std::chrono::seconds(0)) != std::future_status::ready; });
          now.take(proof.get());
        } else {
          improve_for(now, 2, 0);
          now.take(prove(now, now.remaining() / 2));
        }
      }
    }
    look(now, [] { return false; });
    return now.answer();
  }

 private:
  /// What is known so far. Two threads may `run`, `suggest` and report; the rest is for one.
  class search {
   public:
    search(const problem& problem, bytes_t bytes, monitor& m)
        : p(problem), budget(bytes), best(p, budget), whole_(m), all_(m, 1) {}

    const problem& p;
    const bytes_t budget;
    const std::vector<operation_id> needed = needed_operations(p);
    incumbent best;

    /// Nothing more to be done?
    bool done() const { return all_.stopped() || answer_.status == status::infeasible; }
    /// Lends some seconds of the time that is left: as many under every limit, so that a longer search begins as a shorter one
    /// does. Times reported are those of schedules in `best`, if `offered`.
    template <class F>
    auto within(double seconds, bool offered, F&& work) {
      const double left = all_.remaining();
      monitor part(all_, std::isfinite(left) && seconds < left ? seconds / left : 1,
                   [this, offered](const progress& x) { return told(x, offered); });
      return work(part);
    }
    template <solver S>
    result run(const S& s, double seconds) {
      if (done()) return {};
      return within(seconds, false, [&](monitor& m) { return s.solve(p, budget, m); });
    }
    void take(const result& found) {
      if (found.found()) best.offer(compute_order(found.schedule));
      answer_.budget_bound = std::max(answer_.budget_bound, found.budget_bound);
      if (!found.scope.empty()) answer_.scope = found.scope, answer_.scope_bound = found.scope_bound;
      if (found.status == status::infeasible && !best.found()) answer_.status = status::infeasible;
      told({.stage = "automatic", .best = best.seconds(), .bound = found.bound}, true);
    }
    void take(const bound::time_bound& proven) {
      result r;
      r.budget_bound = proven.budget;
      if (std::isfinite(proven.seconds))
        r.bound = proven.seconds;
      else
        r.status = status::infeasible;
      take(r);
    }
    /// An order, of any memory need, that a schedule may be made of.
    void suggest(std::vector<operation_id> order) {
      const std::lock_guard guard(lock_);
      suggestions_.push_back(std::move(order));
    }
    /// The last of them, or nothing.
    std::optional<std::vector<operation_id>> suggestion() {
      const std::lock_guard guard(lock_);
      if (suggestions_.empty()) return std::nullopt;
      auto last = std::move(suggestions_.back());
      suggestions_.pop_back();
      return last;
    }
    double remaining() const { return all_.remaining(); }
    double bound() const { return bound_; }
    double seconds() const { return seconds_; }
    result answer() {
      answer_.bound = bound_;
      best.put_into(answer_);
      return std::move(answer_);
    }

   private:
    control told(progress x, bool offered) {
      const std::lock_guard guard(lock_);
      bound_ = x.bound = std::max(x.bound, bound_.load());
      if (offered) seconds_ = std::min(x.best, seconds_.load());
      if (seconds_ < x.best) x.best = seconds_, x.schedule = nullptr;
      whole_.report(std::move(x));
      if (seconds_ * (1 - whole_.limits().gap) <= bound_) all_.request_stop();
      return control::go_on;
    }

    monitor& whole_;
    monitor all_;
    std::mutex lock_;
    std::atomic<double> seconds_ = std::numeric_limits<double>::infinity(), bound_ = 0;
    std::vector<std::vector<operation_id>> suggestions_;
    result answer_;
  };

  /// Works on the bound; what the MILPs of several moments find are suggestions.
  bound::time_bound prove(search& now, double seconds) const {
    return now.within(seconds, false, [&](monitor& m) {
      const auto proven =
          bound::multi_cut_bound<B>(now.p, now.budget, m, {}, backend_, [&](const auto& form, const auto& x, double) {
            if (auto order = bound::order_of(now.p, form, x)) now.suggest(std::move(*order));
            return now.seconds();
          });
      if (std::isfinite(proven.seconds)) m.report({.stage = "moments", .bound = proven.seconds});
      return proven;
    });
  }
  /// Works on the schedule until nothing more is found and nobody is `proving`.
  template <class Proving>
  void look(search& now, Proving&& proving) const {
    bool staged = now.p.operations().size() > options_.staged_operations;
    bool finding = true;
    for (std::uint64_t stream = 1; !now.done() && finding; ++stream) {
      finding = proving();
      while (auto order = now.suggestion()) follow(now, std::move(*order));
      finding = improve_for(now, staged ? 10 : 5, stream) || finding;
      if (!std::exchange(staged, true)) run_staged(now);
    }
  }
  /// @return false if it found nothing, though it had the time
  bool improve_for(search& now, double seconds, std::uint64_t stream) const {
    if (now.done()) return false;
    auto o = options_.search;
    o.stream = stream;
    return now.within(seconds, true, [&](monitor& m) {
      const double before = now.seconds();
      order::local_search(now.p, now.best.found() ? now.best.order() : now.needed, now.best, m, o, now.bound());
      return m.stopped() || now.best.seconds() < before;
    });
  }
  /// Looks around a suggestion, for a short while.
  void follow(search& now, std::vector<operation_id> order) const {
    if (now.done()) return;
    incumbent other(now.p, now.budget);
    auto o = options_.search;
    o.patience = std::min<std::size_t>(o.patience, 300);
    now.within(1, false, [&](monitor& m) { order::local_search(now.p, std::move(order), other, m, o, now.bound()); });
    if (other.found() && now.best.offer(other.order())) now.take(result{});
  }

  void run_staged(search& now) const {
    if constexpr (milp::backend<B>) {
      auto o = checkmate<B>::options::balanced();
      if (now.best.found()) o.start = with_drops(now.p, now.best.order());
      now.take(now.run(checkmate<B>(o, backend_), now.remaining() * 0.4));
    }
  }

  static constexpr double never = std::numeric_limits<double>::infinity();
  options options_;
  B backend_;
};

}  // namespace remat
