// SPDX-License-Identifier: Apache-2.0
/// @file
/// The solver one gets without asking for one. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <future>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/improve.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/moments.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// For `automatic` without a MILP library.
struct no_backend {};

/// Runs what suits the size of the problem, each from the best schedule so far, until a bound is met within `limits.gap`, nothing
/// more is found or time is up: minimum cuts first, which take a fraction of a second; then local search and the staged MILP
/// for the schedule, and several moments at once for the bound. With `limits.threads` of 2 or more, schedule and bound are
/// worked on at the same time. Anytime: every improvement is reported. Copies to the host are not used.
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
    std::size_t moment_operations = 1000;  ///< larger problems do without the bound from several moments
    std::size_t staged_operations = 250;   ///< larger problems do without the staged MILP
    improve_options search = {};           ///< of the local search
  };

  automatic() : automatic(options{}) {}
  /// @throws bad_option if the options of the local search are out of range
  explicit automatic(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) { o.search.validate(); }

  std::string name() const { return "automatic"; }

  /// @throws what the backend throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    search now(p, budget, m);
    if (now.best.offer(needed_operations(p))) return now.answer();
    now.take(now.run(min_cut(), 0.3));
    const auto n = needed_operations(p).size();
    if constexpr (milp::backend<B>) {
      if (n <= options_.moment_operations && m.limits().threads > 1) {
        auto proof = std::async(std::launch::async, [&] { return now.run(several_moments(), 1); });
        look(now, n);
        now.take(proof.get());
      } else if (n <= options_.moment_operations) {
        improve_for(now, 0.15);
        now.take(now.run(several_moments(), 0.5));
      }
    }
    look(now, n);
    return now.answer();
  }

 private:
  /// What is known so far. Two threads may `run` and report; the rest is for one.
  class search {
   public:
    search(const problem& problem, bytes_t bytes, monitor& m)
        : p(problem), budget(bytes), best(p, budget), whole_(m), all_(m, 1) {}

    const problem& p;
    const bytes_t budget;
    incumbent best;

    /// Nothing more to be done?
    bool done() const { return all_.stopped() || answer_.status == status::infeasible; }
    /// Lends a part of the time that is left. Times reported are those of schedules in `best`, if `offered`.
    template <class F>
    auto within(double share, bool offered, F&& work) {
      monitor part(all_, share, [this, offered](const progress& x) { return told(x, offered); });
      return work(part);
    }
    template <solver S>
    result run(const S& s, double share) {
      if (done()) return {};
      return within(share, false, [&](monitor& m) { return s.solve(p, budget, m); });
    }
    void take(const result& found) {
      if (found.found()) best.offer(compute_order(found.schedule));
      answer_.budget_bound = std::max(answer_.budget_bound, found.budget_bound);
      if (!found.scope.empty()) answer_.scope = found.scope, answer_.scope_bound = found.scope_bound;
      if (found.status == status::infeasible && !best.found()) answer_.status = status::infeasible;
      told({.stage = "automatic", .best = best.seconds(), .bound = found.bound}, true);
    }
    double bound() const { return bound_; }
    result answer() {
      answer_.bound = bound_;
      best.put_into(answer_);
      return std::move(answer_);
    }

   private:
    control told(progress x, bool offered) {
      const std::lock_guard guard(lock_);
      bound_ = x.bound = std::max(x.bound, bound_.load());
      if (offered) seconds_ = std::min(seconds_, x.best);
      x.best = std::min(seconds_, x.best);
      whole_.report(std::move(x));
      if (seconds_ * (1 - whole_.limits().gap) <= bound_) all_.request_stop();
      return control::go_on;
    }

    monitor& whole_;
    monitor all_;
    std::mutex lock_;
    double seconds_ = std::numeric_limits<double>::infinity();
    std::atomic<double> bound_ = 0;
    result answer_;
  };

  /// Works on the schedule.
  void look(search& now, std::size_t operations) const {
    improve_for(now, 0.35);
    if constexpr (milp::backend<B>) {
      if (operations <= options_.staged_operations) {
        auto o = checkmate<B>::options::balanced();
        if (now.best.found()) o.start = with_drops(now.p, now.best.order());
        now.take(now.run(checkmate<B>(o, backend_), 0.6));
      }
    }
    improve_for(now, 1);
  }
  void improve_for(search& now, double share) const {
    if (now.done()) return;
    now.within(share, true, [&](monitor& m) {
      improve(now.p, now.best.found() ? now.best.order() : needed_operations(now.p), now.best, m, options_.search, now.bound());
    });
  }
  auto several_moments() const { return moments<B>(moment_options{}, backend_); }

  options options_;
  B backend_;
};

}  // namespace remat
