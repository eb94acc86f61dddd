// SPDX-License-Identifier: Apache-2.0
/// @file
/// Exhaustive search for the optimum of tiny problems on several tiers. Shares no code with any solver.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::testing {

/// Result of `exhaustive_optimum_on_tiers`.
struct tier_optimum {
  double seconds = std::numeric_limits<double>::infinity();  ///< time or period of `best`, s; infinity: no schedule fits
  remat::schedule best = {};
};

namespace detail {

/// State after some steps of a schedule: the values on each tier, and how far each clock is ahead of the clock of the device.
struct tier_label {
  std::uint64_t present = 0;   ///< bit set of (value, tier)
  std::uint32_t has_run = 0;   ///< bit set of operations that have run
  double clock = 0;            ///< clock of the device, s; in the k-th step of a cyclic schedule, minus k periods
  std::vector<double> clocks;  ///< ahead of `clock`, s: per value and tier: ready, busy; per tier: room free, idle; streams
  const tier_label* previous = nullptr;  ///< predecessor
  std::vector<step> steps = {};          ///< steps since `previous`
  std::size_t length = 0;                ///< number of steps so far
  bool begins_step = false;              ///< true at the beginning of a step
  bool is_dominated = false;             ///< true if another label dominates this label

  /// True if `x`, with equal `present` and `has_run`, dominates this label: every continuation is possible from `x`, as early.
  bool is_dominated_by(const tier_label& x, double slack) const {
    if (x.clock > clock + slack) return false;
    for (std::size_t i = 0; i < clocks.size(); ++i)
      if (x.clock + x.clocks[i] > clock + clocks[i] + slack) return false;
    return true;
  }
};

/// Enumerates all schedules, step by step, without dominated labels. After each step of a cyclic schedule the next step follows,
/// with all clocks put back by the best period known. If a step ends with no clock later than at its beginning, and the clock of
/// the device earlier, the step repeats within a shorter period.
class tier_search {
 public:
  tier_search(const problem& p, bytes_t budget, std::size_t max_states)
      : p_(p),
        budget_(budget),
        max_states_(max_states),
        tiers_(p.tiers().size()),
        values_(p.values().size()),
        cyclic_(!p.next().empty()) {
    const auto refuse = [](const std::string& why) { throw bad_option("exhaustive_optimum_on_tiers: " + why); };
    if (values_ * tiers_ > 64) refuse("more than 64 places for values");
    if (p.operations().size() > 32) refuse("more than 32 operations");
    for (const auto& l : p.links()) {
      const auto same = [&](const copy_link& other) { return other.stream == l.stream; };
      streams_.push_back(static_cast<std::size_t>(std::find_if(p.links().begin(), p.links().end(), same) - p.links().begin()));
      for (const auto& v : p.values()) max_ahead_ += l.latency + static_cast<double>(v.bytes) / l.rate;
    }
    for (const auto& o : p.operations()) max_ahead_ += o.seconds;
  }

  std::optional<tier_optimum> run() {
    if (cyclic_) optimum_.seconds = 1e3 * (1 + max_ahead_);
    const auto seconds_of_no_schedule = optimum_.seconds;
    start_tiers_.assign(values_, any_tier);
    if (!begin(0)) return std::nullopt;
    if (optimum_.seconds == seconds_of_no_schedule) return tier_optimum{};
    return std::move(optimum_);
  }

 private:
  std::size_t ready_index(value_id v, tier_id t) const { return v * tiers_ + t; }
  std::uint64_t bit(value_id v, tier_id t) const { return std::uint64_t{1} << ready_index(v, t); }
  std::size_t busy_index(value_id v, tier_id t) const { return values_ * tiers_ + ready_index(v, t); }
  std::size_t room_index(tier_id t) const { return 2 * values_ * tiers_ + t; }
  std::size_t tier_index(tier_id t) const { return room_index(t) + tiers_; }
  std::size_t stream_index(std::size_t l) const { return 2 * (values_ + 1) * tiers_ + streams_[l]; }
  bool is_on(const tier_label& s, value_id v, tier_id t) const { return (s.present & bit(v, t)) != 0; }
  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }
  bytes_t room(const tier_label& s, tier_id t) const {
    auto free_bytes = t == device_tier ? budget_ : p_.capacity(t);
    for (value_id v = 0; v < values_; ++v)
      if (is_on(s, v, t)) free_bytes -= bytes(v);
    return free_bytes;
  }
  bool held(value_id v, tier_id t) const { return p_.values()[v].held && start_tiers_[v] == t; }
  /// Bit set of the values that may still be read, or that must exist at the end.
  std::uint64_t wanted_values(const tier_label& s) const {
    std::uint64_t all = 0;
    const auto is_wanted = [&](value_id v) { return (all >> v & 1) != 0; };
    for (value_id v = 0; v < values_; ++v)
      if (p_.is_target(v) || (cyclic_ && end_tiers_[v] != any_tier)) all |= std::uint64_t{1} << v;
    for (auto o = needed_.rbegin(); o != needed_.rend(); ++o) {
      const auto& op = p_.operations()[*o];
      const bool ran_before = (s.has_run >> *o & 1) != 0;
      if (!ran_before || (!runs_once(*o) && std::any_of(op.outputs.begin(), op.outputs.end(), is_wanted)))
        for (auto v : op.inputs) all |= std::uint64_t{1} << v;
    }
    return all;
  }
  bool runs_once(operation_id o) const { return p_.operations()[o].once || !p_.operations()[o].overwrites.empty(); }
  void remove(tier_label& s, value_id v, tier_id t) const {
    s.present &= ~bit(v, t);
    s.clocks[ready_index(v, t)] = s.clocks[busy_index(v, t)] = 0;
  }
  void drop(tier_label& s, value_id v, tier_id t) const {
    const double quiet = std::max(s.clocks[ready_index(v, t)], s.clocks[busy_index(v, t)]);
    remove(s, v, t);
    s.steps.emplace_back(action::drop, v).from = t;
    t == device_tier ? advance_clocks(s, quiet) : raise_to(s.clocks[room_index(t)], quiet);
  }
  static void raise_to(double& x, double to) { x = std::max(x, to); }
  static void advance_clocks(tier_label& s, double seconds) {
    s.clock += seconds;
    for (auto& x : s.clocks) x = std::max(0.0, x - seconds);
  }

  /// Tries each placement of the sources from `v` on. @return false if the search gives up
  bool begin(value_id v) {
    while (v < values_ && !p_.is_source(v)) ++v;
    if (v == values_) return search();
    for (tier_id t = 0; t < tiers_; ++t) {
      if (p_.values()[v].starts != t && p_.values()[v].starts != any_tier) continue;
      start_tiers_[v] = t;
      if (!begin(v + 1)) return false;
    }
    return true;
  }
  /// Searches with all sources placed. For a cyclic problem, starts again after each better period found.
  /// @return false if the search gives up
  bool search() {
    end_tiers_ = start_tiers_;
    for (const auto& [target, source] : p_.next()) end_tiers_[target] = std::exchange(end_tiers_[source], any_tier);
    for (auto v : p_.targets())
      if (const auto t = p_.values()[v].ends; cyclic_ && t != any_tier && end_tiers_[v] != any_tier && end_tiers_[v] != t)
        return true;
    do {
      improved_ = needs_several_steps_ = false;
      labels_.clear();
      labels_by_state_.clear();
      queue_ = {};
      tier_label first;
      for (value_id v = 0; v < values_; ++v)
        if (start_tiers_[v] != any_tier) first.present |= bit(v, start_tiers_[v]);
      first.clocks.assign(2 * (values_ + 1) * tiers_ + streams_.size(), 0);
      first.begins_step = true;
      for (tier_id t = 0; t < tiers_; ++t)
        if (room(first, t) < 0) return true;
      add_label(std::move(first));
      while (!queue_.empty() && !improved_ && !needs_several_steps_) {
        const auto* s = queue_.top();
        queue_.pop();
        if (s->is_dominated || is_hopeless(*s)) continue;
        if (labels_.size() > max_states_) return false;
        if (cyclic_ && end_step(*s)) continue;
        if (!cyclic_) finish(*s);
        expand(*s);
      }
    } while (improved_ && cyclic_);
    return !needs_several_steps_;
  }
  /// True if no continuation can beat the best schedule even without waits, or if a clock of a cyclic schedule is too far ahead.
  bool is_hopeless(const tier_label& s) const {
    double least = s.clock;
    for (auto o : needed_)
      if (p_.operations()[o].on == device_tier && (s.has_run >> o & 1) == 0) least += p_.operations()[o].seconds;
    const auto far = [&](double x) { return x > 4 * max_ahead_; };
    return least >= optimum_.seconds - slack || (cyclic_ && std::any_of(s.clocks.begin(), s.clocks.end(), far));
  }
  void add_label(tier_label s) {
    const auto all = s.begins_step ? ~std::uint64_t{0} : wanted_values(s);
    for (value_id v = 0; v < values_; ++v)  // drop values at once that are neither wanted nor in use
      for (tier_id t = 0; t < tiers_ && (all >> v & 1) == 0; ++t)
        if (is_on(s, v, t) && s.clocks[ready_index(v, t)] <= 0 && s.clocks[busy_index(v, t)] <= 0 && !held(v, t)) drop(s, v, t);
    auto& others = labels_by_state_[s.present ^ std::uint64_t{s.has_run} * 0x9e3779b97f4a7c15u];
    for (auto* x : others)
      if (!x->is_dominated && x->present == s.present && x->has_run == s.has_run && s.is_dominated_by(*x, slack)) return;
    std::erase_if(others, [&](tier_label* x) {
      return x->present == s.present && x->has_run == s.has_run && x->is_dominated_by(s, 0) && (x->is_dominated = true);
    });
    s.length += s.steps.size();
    labels_.push_back(std::move(s));
    others.push_back(&labels_.back());
    queue_.push(&labels_.back());
  }
  tier_label successor_of(const tier_label& s) const {
    auto next = s;
    next.previous = &s;
    next.steps.clear();
    next.begins_step = false;
    return next;
  }
  schedule steps_to(const tier_label* s) const {
    std::vector<const tier_label*> path = {s};
    while (path.back()->previous && !path.back()->previous->begins_step) path.push_back(path.back()->previous);
    schedule all;
    for (; !path.empty(); path.pop_back())
      all.steps.insert(all.steps.end(), path.back()->steps.begin(), path.back()->steps.end());
    for (value_id v = 0; v < values_; ++v)
      if (p_.is_source(v) && p_.values()[v].starts == any_tier) all.starts.push_back({v, start_tiers_[v]});
    return all;
  }

  void finish(const tier_label& s) {
    double last = 0;
    for (auto v : p_.targets()) {
      double first = std::numeric_limits<double>::infinity();
      for (tier_id t = 0; t < tiers_; ++t)
        if ((p_.values()[v].ends == t || p_.values()[v].ends == any_tier) && is_on(s, v, t))
          first = std::min(first, s.clocks[ready_index(v, t)]);
      last = std::max(last, first);
    }
    if (s.clock + last < optimum_.seconds - slack) optimum_ = {s.clock + last, steps_to(&s)};
  }
  /// Ends a step of a cyclic schedule: drops the values that remain, and begins the next step.
  /// @return false if the step is not at its end
  bool end_step(const tier_label& s) {
    for (auto v : p_.targets()) {
      bool there = false;
      for (tier_id t = 0; t < tiers_; ++t)
        there = there || (is_on(s, v, t) && (p_.values()[v].ends == t || p_.values()[v].ends == any_tier));
      if (!there) return false;
    }
    for (value_id v = 0; v < values_; ++v)
      if (end_tiers_[v] != any_tier && !is_on(s, v, end_tiers_[v])) return false;
    auto next = successor_of(s);
    for (value_id v = 0; v < values_; ++v)
      for (tier_id t = 0; t < tiers_; ++t)
        if (is_on(next, v, t) && t != end_tiers_[v]) {
          const bool leaves = p_.is_target(v) && end_tiers_[v] == any_tier && start_tiers_[v] == any_tier;
          drop(next, v, t);
          if (leaves) next.steps.pop_back();
        }
    for (const auto& [target, source] : p_.next()) {
      const auto t = start_tiers_[source];
      next.present = (next.present & ~bit(target, t)) | bit(source, t);
      next.clocks[ready_index(source, t)] = std::exchange(next.clocks[ready_index(target, t)], 0);
      next.clocks[busy_index(source, t)] = std::exchange(next.clocks[busy_index(target, t)], 0);
    }
    next.has_run = 0;
    next.begins_step = true;
    next.clock -= optimum_.seconds;
    for (const auto* x = &s; x; x = x->previous)
      if (x->begins_step && next.clock < x->clock - slack && x->is_dominated_by(next, slack)) return shorten(next), true;
    add_label(std::move(next));
    return true;
  }
  /// Finds a step on the path to `last` that repeats within less than the best period. If only several steps in turn do, the
  /// search gives up.
  void shorten(const tier_label& last) {
    for (const auto* x = &last; x->previous; x = x->previous) {
      if (!x->begins_step) continue;
      auto s = steps_to(x);
      const auto seconds = evaluate(p_, s).seconds;
      if (seconds >= optimum_.seconds - slack) continue;
      optimum_ = {seconds, std::move(s)};
      improved_ = true;
      return;
    }
    needs_several_steps_ = true;
  }
  /// Continues with each computation and copy. Drops come right before the step that needs room: earlier drops allow no more.
  void expand(const tier_label& s) {
    const auto all = wanted_values(s);
    for (auto o : needed_) {
      const auto& op = p_.operations()[o];
      if ((s.has_run >> o & 1) != 0 && runs_once(o)) continue;
      if (!std::all_of(op.inputs.begin(), op.inputs.end(), [&](value_id v) { return is_on(s, v, op.on); })) continue;
      const auto done = [&](value_id v) {
        return (all >> v & 1) == 0 || (is_on(s, v, op.on) && s.clocks[ready_index(v, op.on)] <= 0);
      };
      if ((s.has_run >> o & 1) != 0 && std::all_of(op.outputs.begin(), op.outputs.end(), done)) continue;
      auto needed_bytes = op.workspace;
      for (auto v : op.outputs) needed_bytes += bytes(v);
      for (const auto& x : op.overwrites) needed_bytes -= bytes(x.output);
      make_room(successor_of(s), op.on, needed_bytes, op.inputs, 0, [&](tier_label label) { compute(std::move(label), o); });
      auto without_outputs = successor_of(s);
      for (auto v : op.outputs)
        if (is_on(s, v, op.on)) drop(without_outputs, v, op.on);
      if (op.on != device_tier && !without_outputs.steps.empty())
        make_room(std::move(without_outputs), op.on, needed_bytes, op.inputs, 0,
                  [&](tier_label label) { compute(std::move(label), o); });
    }
    for (value_id v = 0; v < values_; ++v)
      for (std::size_t l = 0; l < p_.links().size(); ++l) {
        const auto& link = p_.links()[l];
        if (!p_.values()[v].movable || !is_on(s, v, link.from) || is_on(s, v, link.to) || (all >> v & 1) == 0) continue;
        make_room(successor_of(s), link.to, bytes(v), {}, 0, [&](tier_label label) {
          if (is_on(label, v, link.from)) copy(std::move(label), v, l);
        });
      }
  }
  /// Calls `next_step` for each way to have `needed_bytes` free on tier `t`: drops values in ascending order, from `first` on and
  /// none of `used`, until there is room.
  template <class Next>
  void make_room(tier_label s, tier_id t, bytes_t needed_bytes, const std::vector<value_id>& used, value_id first,
                 const Next& next_step) {
    if (room(s, t) >= needed_bytes) return next_step(std::move(s));
    for (auto v = first; v < values_; ++v) {
      if (!is_on(s, v, t) || bytes(v) == 0 || held(v, t)) continue;
      if (std::find(used.begin(), used.end(), v) != used.end()) continue;
      auto next = s;
      drop(next, v, t);
      make_room(std::move(next), t, needed_bytes, used, v + 1, next_step);
    }
  }
  void compute(tier_label s, operation_id o) {
    const auto& op = p_.operations()[o];
    const auto t = op.on;
    double last = t == device_tier ? 0 : std::max(s.clocks[tier_index(t)], s.clocks[room_index(t)]);
    for (auto v : op.inputs) raise_to(last, s.clocks[ready_index(v, t)]);
    for (const auto& x : op.overwrites) raise_to(last, s.clocks[busy_index(x.input, t)]);
    last += op.seconds;
    s.steps.emplace_back(action::compute, o);
    s.has_run |= std::uint32_t{1} << o;
    bool frees_room = op.workspace > 0;
    if (t != device_tier)
      for (auto v : op.inputs) raise_to(s.clocks[busy_index(v, t)], last);
    for (const auto& x : op.overwrites) remove(s, x.input, t);
    for (auto v : op.outputs) {
      frees_room = frees_room || is_on(s, v, t);
      s.present |= bit(v, t);
      s.clocks[ready_index(v, t)] = last;
    }
    if (t == device_tier) {
      advance_clocks(s, last);
    } else {
      s.clocks[tier_index(t)] = last;
      if (frees_room) raise_to(s.clocks[room_index(t)], last);
    }
    add_label(std::move(s));
  }
  void copy(tier_label s, value_id v, std::size_t l) {
    const auto& link = p_.links()[l];
    auto& last = s.clocks[stream_index(l)];
    raise_to(last, s.clocks[ready_index(v, link.from)]);
    if (link.to != device_tier) raise_to(last, s.clocks[room_index(link.to)]);
    last += link.latency + static_cast<double>(bytes(v)) / link.rate;
    raise_to(s.clocks[busy_index(v, link.from)], last);
    s.present |= bit(v, link.to);
    s.clocks[ready_index(v, link.to)] = last;
    auto& x = s.steps.emplace_back(action::copy, v);
    x.from = link.from, x.to = link.to;
    add_label(std::move(s));
  }
  struct later_first {
    bool operator()(const tier_label* a, const tier_label* b) const {
      return std::pair(a->clock, a->length) > std::pair(b->clock, b->length);
    }
  };
  static constexpr double slack = 1e-9;

  const problem& p_;
  const bytes_t budget_;
  const std::size_t max_states_, tiers_, values_;
  const bool cyclic_;
  const std::vector<operation_id> needed_ = needed_operations(p_);
  std::vector<std::size_t> streams_;  // of each link
  double max_ahead_ = 0;              // time of all operations and copies, one after the other, s
  std::vector<tier_id> start_tiers_, end_tiers_;
  bool improved_ = false, needs_several_steps_ = false;
  std::deque<tier_label> labels_;
  std::priority_queue<const tier_label*, std::vector<const tier_label*>, later_first> queue_;
  std::unordered_map<std::uint64_t, std::vector<tier_label*>> labels_by_state_;
  tier_optimum optimum_;
};

}  // namespace detail

/// The shortest time of a schedule of `p` within the budgets of all tiers; for a cyclic problem, the shortest period.
/// @param p          a problem of some five operations; slow for more
/// @param budget     budget of the device, bytes
/// @param max_states number of states beyond which the search gives up
/// @return a fastest schedule and its time; nothing if the search gave up, also because several steps in turn would be faster
///         than any repeated step
/// @throws bad_option for more than 64 places (values times tiers) or 32 operations
/// Complexity: O(states (values links + operations)), and each state is compared with those that have the same values on the same
/// tiers; for cyclic problems, once per improvement. Reference: Baccelli et al., "Synchronization and Linearity", Wiley, 1992,
/// section 3.2: the period of a repeated step is the shortest one for which no clock gets later.
/// @code
/// auto best = remat::testing::exhaustive_optimum_on_tiers(p, 12);
/// @endcode
inline std::optional<tier_optimum> exhaustive_optimum_on_tiers(const problem& p, bytes_t budget,
                                                               std::size_t max_states = 60'000) {
  return detail::tier_search(p, budget, max_states).run();
}

}  // namespace remat::testing
