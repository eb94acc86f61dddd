// SPDX-License-Identifier: Apache-2.0
/// @file
/// Local search over orders of computations, judged by their time with copies.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/copies/early_copies.hpp>
#include <remat/copies/schedule_copies.hpp>
#include <remat/copies/virtual_problem.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/destroy_repair.hpp>

namespace remat::copies {

/// Input of `schedule_copies`: an order of computations, and which values are offloaded first or never.
struct order_with_departures {
  std::vector<operation_id> order;
  std::vector<departure> departures{};  ///< per value. Empty: all `in_turn`
};

/// The fastest schedule with copies found so far within a budget. Several threads may use it.
class copy_incumbent {
 public:
  /// @param p      a problem that `schedule_copies` takes; must outlive this
  /// @param budget bytes
  /// @param stop   polled in long orders, by each thread that offers an order; true gives up on that order
  copy_incumbent(const remat::problem& p, bytes_t budget, std::function<bool()> stop = {})
      : p_(p), budget_(budget), stop_(std::move(stop)) {}

  const remat::problem& problem() const { return p_; }
  bytes_t budget() const { return budget_; }
  double seconds() const { return seconds_; }  ///< by `evaluate`, s; infinity if there is no schedule
  /// The order of the fastest schedule.
  order_with_departures order() const {
    const std::lock_guard guard(lock_);
    return order_;
  }
  /// Lays copies over a valid order and keeps the schedule if it is the fastest so far. Tries two ways, `frugal` or not, within
  /// the share of the budget that the fastest schedule so far uses. The faster way counts.
  ///
  /// A third way, demand paging, is slower to try. It is tried for the first order, for orders over which no copies can be laid
  /// otherwise, and as long as demand paging gave the fastest schedule.
  /// @param limit s: gives up on schedules that take longer
  /// @return the schedule and its waits; nothing if the order does not fit, or if `limit` or `stop` made it give up
  /// Complexity: that of `schedule_copies`, and that of `evaluate` if the schedule may be the fastest.
  std::optional<order_with_copies> offer(const order_with_departures& order,
                                         double limit = std::numeric_limits<double>::infinity()) {
    const bool first = !any_laid_;
    if (!p_.plain()) limit *= 1.01;  // the period by `evaluate` may be shorter
    const auto share = share_.load();
    auto laid = lay_within_share(order, limit, share);
    if (!laid && share < 1) laid = lay_within_share(order, limit, 1);
    if (!p_.plain() && order.departures.empty() && !should_stop(order) &&
        (first || best_is_paged_ || (!laid && std::isinf(limit))))
      if (auto paged = schedule_copies(p_, order.order, budget_, {.on_demand = true, .stop = stop_});
          paged && (!laid || paged->seconds < laid->seconds) && keep_if_fastest(order, *paged, 0))
        laid = std::move(paged);
    return laid;
  }
  /// Keeps an order without copies, such as that of an `incumbent`, if it is valid, fits the budget and is the fastest so far.
  /// @return true if it was kept
  /// Complexity: O(values + edges executed).
  bool offer_without_copies(const std::vector<operation_id>& order) {
    auto s = with_drops(p_, order);
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && p_.values()[v].starts == any_tier) s.starts.push_back({v, device_tier});
    try {
      const auto e = evaluate(p_, s);
      const std::lock_guard guard(lock_);
      if (e.peak > budget_ || !(e.seconds < seconds_)) return false;
      seconds_ = e.seconds;
      order_ = {order};
      schedule_ = std::move(s);
      return true;
    } catch (const bad_schedule&) {  // a value has to leave the device, or an operation runs again that may run only once
      return false;
    }
  }
  /// Lays copies over the best order within shares of the budget. A schedule within a share leaves memory free, so its copies can
  /// start earlier, while the links are idle. If a share gives the fastest schedule, `offer` uses that share from then on. Does
  /// nothing for plain problems.
  /// Complexity: that of some calls of `schedule_copies` and `evaluate`.
  void try_smaller_budgets() {
    if (p_.plain() || !std::isfinite(seconds_)) return;
    const auto best = order();
    for (const double share : {1., 0.75, 0.5, 0.35, 0.25, 0.15}) lay_within_share(best, 1.01 * seconds_, share);
  }
  /// Reports the fastest schedule to the observers of `m`. For one thread at a time.
  /// @param bound proven lower bound on the time, s
  void report(monitor& m, std::string stage, double bound) const {
    const std::lock_guard guard(lock_);
    m.report({.stage = std::move(stage), .best = seconds_.load(), .bound = bound, .schedule = schedule_ ? &*schedule_ : nullptr});
  }
  /// Puts the fastest schedule into `r`. Without a schedule, and if `stop` is not true: a reason that names the tiers with a
  /// budget.
  void put_into(result& r) const {
    if (!schedule_ && !p_.plain() && !(stop_ && stop_()))
      for (const auto& t : p_.tiers())
        if (t.budget)
          r.reason += (r.reason.empty() ? "none found within the budget of the " : ", of the ") + t.name + ", " +
                      std::to_string(*t.budget) + " bytes";
    if (!schedule_) return;
    r.status = status::feasible;
    r.reason.clear();
    r.schedule = *schedule_;
  }

 private:
  bool should_stop(const order_with_departures& order) const {
    return order.order.size() >= copy_options::polled_every && stop_ && stop_();
  }
  /// Lays copies within a share of the budget in two ways, and takes the faster schedule.
  std::optional<order_with_copies> lay_within_share(const order_with_departures& order, double limit, double share) {
    if (should_stop(order)) return std::nullopt;
    const auto budget = share < 1 ? static_cast<bytes_t>(share * static_cast<double>(budget_)) : budget_;
    auto laid = schedule_copies(p_, order.order, budget, {.departures = order.departures, .max_seconds = limit, .stop = stop_});
    if (!should_stop(order) && (laid ? !laid->waits.empty() : !p_.plain()))
      if (auto frugal = schedule_copies(p_, order.order, budget,
                                        {.frugal = true,
                                         .departures = order.departures,
                                         .max_seconds = laid ? std::min(limit, laid->seconds) : limit,
                                         .stop = stop_});
          frugal && (!laid || frugal->seconds < laid->seconds))
        laid = frugal;
    if (laid && (!std::isfinite(laid->seconds) || (laid->seconds <= 1.01 * seconds_ && !keep_if_fastest(order, *laid, share))))
      laid.reset();
    return laid;
  }
  /// Evaluates a schedule, and keeps it if it is the fastest so far.
  /// @param share of the budget; 0: by demand paging
  /// @return false if the schedule has no finite time, because links are too slow
  bool keep_if_fastest(const order_with_departures& order, order_with_copies& laid, double share) {
    auto e = evaluate(p_, laid.schedule);
    auto seconds = laid.seconds = e.seconds;
    if (!std::isfinite(seconds)) return false;
    if (!(seconds < (p_.plain() ? 1 : tighten_within) * seconds_)) return any_laid_ = true;
    auto tight = laid.schedule;
    if (!p_.plain()) seconds = tighten(p_, tight, std::move(e), budget_, stop_);
    const std::lock_guard guard(lock_);
    any_laid_ = true;
    if (seconds < seconds_) {
      seconds_ = seconds;
      order_ = order;
      schedule_ = std::move(tight);
      best_is_paged_ = share == 0;
      if (share > 0) share_ = share;
    }
    return true;
  }

  // Schedules up to this factor slower are tightened, as they may become the best.
  static constexpr double tighten_within = 1.001;
  const remat::problem& p_;
  bytes_t budget_;
  std::function<bool()> stop_;
  order_with_departures order_;
  std::optional<remat::schedule> schedule_;
  std::atomic<bool> any_laid_ = false;       // copies have been laid over some order
  std::atomic<bool> best_is_paged_ = false;  // the fastest schedule is by demand paging
  std::atomic<double> share_ = 1;            // share of the budget within which the fastest schedule was laid
  std::atomic<double> seconds_ = std::numeric_limits<double>::infinity();
  mutable std::mutex lock_;
};

/// When `copy_search` ends.
struct copy_search_options {
  std::size_t patience = 1000;  ///< ends after so many rounds without an improvement, >= 1
  std::uint64_t stream = 0;     ///< searches with the same seed and different streams make different choices

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (patience < 1) throw bad_option("copy_search_options.patience must be >= 1, got 0");
  }
};

namespace detail {

/// Picks a wait of the schedule and the copies that follow one another without a gap up to it. Recomputes some of their values
/// instead.
/// @param positions of the computations of `laid` in the order that `candidate` holds
/// @return false if no value can be computed again
template <class Random>
bool recompute_instead(const problem& p, const order_with_copies& laid, const std::vector<std::size_t>& positions,
                       order::destroy_repair& candidate, Random& random) {
  const auto pick = [&](std::size_t k) { return static_cast<std::size_t>(random() % k); };
  if (laid.waits.empty()) return false;
  auto wait = laid.waits[pick(laid.waits.size())];
  for (int i = 0; i < 4; ++i)  // prefer a long wait
    if (const auto& other = laid.waits[pick(laid.waits.size())]; other.seconds > wait.seconds) wait = other;
  const auto& copies = wait.arrival ? laid.to_device : laid.to_host;
  auto end = std::upper_bound(copies.begin(), copies.end(), wait.until * (1 + 1e-12),
                              [](double t, const order_with_copies::transfer& x) { return t < x.end; });
  struct choice {
    double price;
    value_id value;
    std::size_t next_use;
  };
  std::vector<choice> choices;
  for (auto x = end; x != copies.begin() && choices.size() < 64; --x) {
    const auto& c = *(x - 1);
    if (x != end && c.end < x->begin - 0.02 * laid.seconds) break;
    if (p.is_source(c.value) || p.values()[c.value].bytes == 0) continue;
    if (c.next_use >= positions.size()) continue;  // the device does not use it any more
    const double noise = 0.5 + static_cast<double>(random() % 1024) / 1024;
    choices.push_back({noise * p.operations()[p.producer(c.value)].seconds / static_cast<double>(p.values()[c.value].bytes),
                       c.value, c.next_use});
  }
  const auto count = std::min<std::size_t>(choices.size(), std::size_t{1} << pick(4));
  std::partial_sort(choices.begin(), choices.begin() + static_cast<std::ptrdiff_t>(count), choices.end(),
                    [](const choice& a, const choice& b) { return a.price < b.price; });
  choices.resize(count);
  // Last position first, so that the positions of the others stay valid.
  std::sort(choices.begin(), choices.end(), [](const choice& a, const choice& b) { return a.next_use > b.next_use; });
  const bool deep = pick(2) == 0;
  bool any = false;
  for (const auto& c : choices) any = candidate.recompute_before(c.value, positions[c.next_use], deep) || any;
  return any;
}

/// The values whose departure `change_departures` may choose: only operations on the device make and read them.
inline std::vector<value_id> free_to_depart(const problem& p) {
  std::vector<value_id> values;
  for (value_id v = 0; v < p.values().size(); ++v) {
    const auto& x = p.values()[v];
    const auto elsewhere = [&](operation_id o) { return p.operations()[o].on != device_tier; };
    const auto readers = p.consumers(v);
    if (x.bytes == 0 || x.held || !x.movable || std::any_of(readers.begin(), readers.end(), elsewhere)) continue;
    if (p.plain() || (!p.is_source(v) && !p.is_target(v) && !elsewhere(p.producer(v)))) values.push_back(v);
  }
  return values;
}

/// Changes the departures of one to four random values. Half of the draws are among the values that `laid` copies.
/// @param values the values to choose from, ascending
/// @param count  number of all values
template <class Random>
void change_departures(const std::vector<value_id>& values, const order_with_copies& laid, std::size_t count, Random& random,
                       std::vector<departure>& departures) {
  const auto some = [&](const auto& list) { return list[static_cast<std::size_t>(random() % list.size())]; };
  if (departures.empty()) departures.assign(count, departure::in_turn);
  for (auto changes = 1 + random() % 4; changes > 0; --changes) {
    const auto& copies = random() % 2 == 0 ? laid.to_host : laid.to_device;
    const auto v = random() % 2 == 0 && !copies.empty() ? some(copies).value : some(values);
    if (!std::binary_search(values.begin(), values.end(), v)) continue;
    departures[v] = static_cast<departure>((static_cast<int>(departures[v]) + 1 + static_cast<int>(random() % 2)) % 3);
  }
}

}  // namespace detail

/// Makes an order faster with copies, by local search. Each round does one of three changes:
/// - takes some recomputations out;
/// - recomputes some values for whose copies the schedule waits;
/// - does a round of `local_search` within a *virtual* budget, which is larger than the budget by the bytes that copies are to
///   free.
///
/// After some rounds without an improvement, there is a fourth change: which values are offloaded first or never.
/// `schedule_copies` within the true budget judges each order. Orders are accepted by record-to-record travel, as in
/// `local_search`.
/// @param q              the problem of `best` without copies
/// @param order          a valid order of computations, and the departures, to begin with
/// @param virtual_budget of `q`, bytes
/// @param best           the fastest schedule known; improved
/// @param m              seed, limits and stop; is told of each improvement
/// @param o              when to end
/// @param bound          a lower bound on the time of every schedule, s: reported, and the search ends when it is met
/// @throws bad_option for options out of range, or if the problem allows no copies
/// Complexity: per round, that of a round of `local_search` and of `schedule_copies`; hundreds of rounds per second for thousands
/// of operations.
inline void copy_search(const virtual_problem& q, const order_with_departures& order, bytes_t virtual_budget,
                        copy_incumbent& best, monitor& m, const copy_search_options& o = {}, double bound = 0) {
  o.validate();
  const auto stop = m.stop_check();
  const auto done = [&] { return best.seconds() * (1 - m.limits().gap) <= bound; };
  std::mt19937_64 random(m.limits().seed + (o.stream << 32));
  const auto part = [&] { return static_cast<double>(random() % 1024) / 1024; };
  order::destroy_repair candidate(q.problem(), virtual_budget, random());
  candidate.load(q.wrap(order.order));
  auto unwrapped = q.unwrap(candidate.order());
  auto departures = order.departures;
  auto current = best.offer({unwrapped.order, departures});
  if (!current) return;
  double lowest = current->seconds;
  const auto free = detail::free_to_depart(best.problem());
  constexpr double slack = 0.003;  // accepts orders slower than the best by up to this fraction
  constexpr double reach = 0.1;    // varies the virtual budget by up to this fraction
  for (std::size_t idle = 0; idle < o.patience && !done() && !stop(); ++idle) {
    const double limit = std::max(current->seconds, lowest * (1 + slack * part()));
    auto next_departures = departures;
    switch (random() % (!free.empty() && idle >= o.patience / 5 ? 4 : 3)) {
      case 0:
        candidate.destroy();
        break;
      case 1:
        if (!detail::recompute_instead(best.problem(), *current, unwrapped.positions, candidate, random)) continue;
        break;
      case 3:
        detail::change_departures(free, *current, best.problem().values().size(), random, next_departures);
        if (random() % 2 == 0) candidate.destroy();
        break;
      default:
        candidate.set_budget(static_cast<bytes_t>(static_cast<double>(virtual_budget) * (1 + reach * (2 * part() - 1))));
        for (auto shifts = random() % 3; shifts > 0; --shifts) candidate.shift();
        candidate.destroy();
        candidate.repair(part(), limit, stop);  // copies may make the room that is still lacking
        candidate.retain();
    }
    if (candidate.seconds() <= limit) {
      const auto before = best.seconds();
      auto next = q.unwrap(candidate.order());
      auto laid = best.offer({next.order, next_departures}, limit * (1 + 1e-9));
      if (best.seconds() < before) best.report(m, "copies", bound);
      if (laid && laid->seconds <= limit) {
        candidate.commit();
        current = std::move(laid);
        unwrapped = std::move(next);
        departures = std::move(next_departures);
        if (current->seconds < lowest * (1 - 1e-9)) lowest = current->seconds, idle = 0;
        continue;
      }
    }
    candidate.roll_back();
  }
}

}  // namespace remat::copies
