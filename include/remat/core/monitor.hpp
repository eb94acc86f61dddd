// SPDX-License-Identifier: Apache-2.0
/// @file
/// Limits of a search, progress reports and the monitor that solvers poll.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// Limits of a search.
struct limits {
  double seconds = 60;     ///< wall-clock time, s, >= 0; infinity for none
  unsigned threads = 1;    ///< worker threads a component may start, in [1, max_threads]
  std::uint64_t seed = 0;  ///< seed of all random choices; equal seeds give equal results unless a limit stops the search
  double gap = 1e-4;       ///< relative gap (time - bound) / time below which a schedule counts as optimal, in [0, 1)

  static constexpr unsigned max_threads = 1024;  ///< with more, systems run out of threads and libraries hang

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (!(seconds >= 0)) throw bad_option("limits.seconds must be >= 0, got " + std::to_string(seconds));
    if (threads < 1 || threads > max_threads)
      throw bad_option("limits.threads must be in [1, " + std::to_string(max_threads) + "], got " + std::to_string(threads));
    if (!(gap >= 0 && gap < 1)) throw bad_option("limits.gap must be in [0, 1), got " + std::to_string(gap));
  }
};

/// A snapshot of a search, given to observers.
struct progress {
  std::string stage;                                      ///< what the solver is doing, such as "block 3 of 8"
  double elapsed = 0;                                     ///< time since the search began, s
  double best = std::numeric_limits<double>::infinity();  ///< time of the best schedule so far, s; infinity before the first
  double bound = 0;                                       ///< proven lower bound on the time, s
  const remat::schedule* schedule = nullptr;              ///< schedule of time `best`, valid during the call; may be null
  bytes_t peak = 0;                                       ///< peak of `schedule`, bytes
  double idle = 0;                                        ///< time since the search last reported a smaller `best`, s
};

/// Answer of an observer. An observer without a return value means `go_on`.
enum class control { go_on, stop };

/// Anything callable with a `progress`, returning nothing or a `control`.
/// @code
/// static_assert(remat::observer<decltype([](const remat::progress&) {})>);
/// static_assert(!remat::observer<decltype([](int) {})>);
/// @endcode
template <class O>
concept observer = std::invocable<O&, const progress&> &&(std::is_void_v<std::invoke_result_t<O&, const progress&>> ||
                                                          std::same_as<std::invoke_result_t<O&, const progress&>, control>);

/// Connects a search to its caller: the solver polls the limits, and reports its progress to observers. Each call of `solve` has
/// one monitor. Observers run on the thread that reports; only one thread may report at a time.
/// Complexity: O(1) per call, and the time of the observers.
class monitor {
 public:
  monitor() : monitor(remat::limits{}) {}
  explicit monitor(const remat::limits& l, std::function<control(const progress&)> notify = {})
      : limits_(l), notify_(std::move(notify)) {}

  /// Monitor for a component of a solver, with a share of the remaining time. It stops when `outer` stops.
  /// @param outer  monitor of the whole search; must outlive this monitor
  /// @param share  share of the remaining time, in [0, 1]
  /// @param notify observer of the component; by default, the reports go to `outer`
  monitor(monitor& outer, double share, std::function<control(const progress&)> notify = {})
      : limits_(outer.limits_for_share(share)), notify_(std::move(notify)), outer_(&outer) {
    if (!notify_)
      notify_ = [&outer](const progress& p) {
        outer.report(p);
        return control::go_on;
      };
  }

  const remat::limits& limits() const { return limits_; }
  double elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  /// Seconds left, >= 0; infinity without a time limit.
  double remaining() const { return std::max(0.0, limits_.seconds - elapsed()); }
  /// True once the time is up or an observer asked to stop. Solvers then return their best schedule within a second.
  bool stopped() const { return stop_requested() || remaining() <= 0; }
  /// `stopped` as a function, for components that poll. The monitor must outlive it.
  std::function<bool()> stop_check() const {
    return [this] { return stopped(); };
  }
  /// The limits of a search inside this search: those of this search, with a share of the time that is left.
  /// @param share in [0, 1]
  remat::limits limits_for_share(double share) const {
    auto l = limits_;
    l.seconds = remaining() * share;
    return l;
  }
  /// True if an observer, or `request_stop`, asked to stop.
  bool stop_requested() const { return stopped_ || (outer_ && outer_->stop_requested()); }
  /// Asks the solver to stop; from any thread.
  void request_stop() { stopped_ = true; }
  /// Begins a new search, such as for another budget: the best time reported so far no longer counts.
  void restart() { best_ = std::numeric_limits<double>::infinity(), improved_ = elapsed(); }
  /// Calls the observers. A solver reports each improvement, and otherwise at most some ten times a second.
  void report(progress p) {
    p.elapsed = elapsed();
    if (p.best < best_) best_ = p.best, improved_ = p.elapsed;
    p.idle = p.elapsed - improved_;
    if (notify_ && notify_(p) == control::stop) stopped_ = true;
  }

 private:
  remat::limits limits_;
  std::function<control(const progress&)> notify_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<bool> stopped_ = false;
  double best_ = std::numeric_limits<double>::infinity(), improved_ = 0;  // the smallest time reported, s, and when
  const monitor* outer_ = nullptr;
};

/// An observer for a search inside another search: stops it when `m`, the monitor of the outer search, is stopped.
/// @param m must outlive the observer
inline auto stop_with(const monitor& m) {
  return [&m](const progress&) { return m.stopped() ? control::stop : control::go_on; };
}

/// An observer for a search inside another search: forwards the reports of the inner search to `m`, the monitor of the outer one,
/// and stops the inner search when an observer of `m` asks to stop.
/// @param m      monitor of the outer search; must outlive the observer
/// @param prefix text before the stage of each report
inline auto report_to(monitor& m, std::string prefix = "") {
  return [&m, prefix = std::move(prefix)](progress inner) {
    inner.stage = prefix + inner.stage;
    m.report(std::move(inner));
    return m.stop_requested() ? control::stop : control::go_on;
  };
}

}  // namespace remat
