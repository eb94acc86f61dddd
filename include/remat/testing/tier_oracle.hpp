// SPDX-License-Identifier: Apache-2.0
/// @file
/// The optimum of tiny problems on several tiers by exhaustive search. Shares no code with any solver.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::testing {

namespace detail {

/// What is where, and for how much longer whatever is busy, in ticks from the clock of the device on.
struct tier_state {
  std::vector<std::int32_t> cells;  ///< per value and tier: ready, busy (-1 twice: it is not there); floors; tiers; streams; runs
  friend bool operator==(const tier_state&, const tier_state&) = default;
};

struct tier_state_hash {
  std::size_t operator()(const tier_state& s) const {
    std::uint64_t h = 0;
    for (auto x : s.cells) h = (h ^ static_cast<std::uint64_t>(x) ^ (h >> 29)) * 0x9e3779b97f4a7c15u;
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

/// Dijkstra's algorithm on these states.
class tier_search {
 public:
  tier_search(const problem& p, bytes_t budget, double tick, std::size_t most)
      : p_(p), budget_(budget), tick_(tick), most_(most), tiers_(p.tiers().size()), values_(p.values().size()) {
    const auto refuse = [](const std::string& why) { throw bad_option("exhaustive_optimum_on_tiers: " + why); };
    if (!p.next().empty()) refuse("the problem is cyclic");
    for (const auto& v : p.values())
      if (v.held && v.starts == any_tier) refuse("a held value may start anywhere");
    for (value_id v = 0; v < values_; ++v) wanted_.push_back(p.is_target(v) || !p.consumers(v).empty());
    for (const auto& l : p.links()) {
      const auto same = [&](const copy_link& other) { return other.stream == l.stream; };
      streams_.push_back(static_cast<std::size_t>(std::find_if(p.links().begin(), p.links().end(), same) - p.links().begin()));
    }
  }

  std::optional<double> run() {
    tier_state s{std::vector<std::int32_t>(runs() + p_.operations().size(), 0)};
    std::fill_n(s.cells.begin(), 2 * values_ * tiers_, std::int32_t{-1});
    begin(s, 0);
    while (!queue_.empty()) {
      const auto [now, at] = queue_.top();
      queue_.pop();
      if (now >= best_) break;
      if (now > least_.at(*at)) continue;
      if (least_.size() > most_) return std::nullopt;
      const auto state = *at;
      end(state, now);
      expand(state, now);
    }
    return best_ == never ? std::numeric_limits<double>::infinity() : static_cast<double>(best_) * tick_;
  }

 private:
  using ticks_t = std::int64_t;
  static constexpr ticks_t never = std::numeric_limits<ticks_t>::max();
  static constexpr std::int32_t absent = -1;

  std::size_t cell(value_id v, tier_id t) const { return 2 * (v * tiers_ + t); }
  std::size_t floors() const { return 2 * values_ * tiers_; }
  std::size_t frees() const { return floors() + tiers_; }
  std::size_t queues() const { return frees() + tiers_; }
  std::size_t runs() const { return queues() + p_.links().size(); }
  bool on(const tier_state& s, value_id v, tier_id t) const { return s.cells[cell(v, t)] != absent; }
  static void raise(std::int32_t& x, ticks_t to) { x = static_cast<std::int32_t>(std::max<ticks_t>(x, to)); }
  ticks_t ticks(double seconds) const { return std::llround(seconds / tick_); }
  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }
  bytes_t room(const tier_state& s, tier_id t) const {
    auto left = t == device_tier ? budget_ : p_.tiers()[t].budget.value_or(max_bytes);
    for (value_id v = 0; v < values_; ++v)
      if (on(s, v, t)) left -= bytes(v);
    return left;
  }
  void leave(tier_state& s, value_id v, tier_id t) const { s.cells[cell(v, t)] = s.cells[cell(v, t) + 1] = absent; }
  void put(tier_state& s, value_id v, tier_id t, ticks_t when) const {
    s.cells[cell(v, t)] = static_cast<std::int32_t>(when);
    s.cells[cell(v, t) + 1] = 0;
  }
  tier_state later(tier_state s, ticks_t passed) const {
    for (std::size_t i = 0; i < runs() && passed > 0; ++i)
      if (s.cells[i] != absent) s.cells[i] = static_cast<std::int32_t>(std::max<ticks_t>(0, s.cells[i] - passed));
    return s;
  }
  void reach(tier_state s, ticks_t now, ticks_t passed = 0) {
    const auto [at, added] = least_.emplace(later(std::move(s), passed), now + passed);
    if (!added && at->second <= now + passed) return;
    at->second = now + passed;
    queue_.emplace(now + passed, &at->first);
  }

  /// Each way to place the sources from `v` on.
  void begin(const tier_state& s, value_id v) {
    if (v == values_) {
      for (tier_id t = 0; t < tiers_; ++t)
        if (room(s, t) < 0) return;
      return reach(s, 0);
    }
    if (!p_.is_source(v)) return begin(s, v + 1);
    for (tier_id t = 0; t < tiers_; ++t) {
      if (p_.values()[v].starts != t && p_.values()[v].starts != any_tier) continue;
      auto next = s;
      put(next, v, t, 0);
      begin(next, v + 1);
    }
  }
  void end(const tier_state& s, ticks_t now) {
    ticks_t last = 0;
    for (auto v : p_.targets()) {
      ticks_t first = never;
      for (tier_id t = 0; t < tiers_; ++t)
        if ((p_.values()[v].ends == t || p_.values()[v].ends == any_tier) && on(s, v, t))
          first = std::min<ticks_t>(first, s.cells[cell(v, t)]);
      if (first == never) return;
      last = std::max(last, first);
    }
    best_ = std::min(best_, now + last);
  }
  /// Drops come right before what they make room for: earlier ones allow no more.
  void expand(const tier_state& s, ticks_t now) {
    for (auto o : needed_) {
      const auto& op = p_.operations()[o];
      const auto has = [&](value_id v) { return on(s, v, op.on); };
      const auto done = [&](value_id v) { return s.cells[cell(v, op.on)] == 0; };
      if (!std::all_of(op.inputs.begin(), op.inputs.end(), has) || std::all_of(op.outputs.begin(), op.outputs.end(), done))
        continue;
      auto more = op.workspace;
      for (auto v : op.outputs) more += bytes(v);
      for (const auto& x : op.overwrites) more -= bytes(x.output);
      make_room(s, now, op.on, more, op.inputs, 0, [&](const tier_state& then, ticks_t at) { compute(then, at, o); });
    }
    for (value_id v = 0; v < values_; ++v)
      for (std::size_t l = 0; l < p_.links().size(); ++l) {
        const auto& link = p_.links()[l];
        if (!p_.values()[v].movable || !on(s, v, link.from) || on(s, v, link.to) || !wanted_[v]) continue;
        make_room(s, now, link.to, bytes(v), {}, 0, [&](const tier_state& then, ticks_t at) { copy(then, at, v, l); });
      }
  }
  /// Each least set of values to drop, none of those below `first` nor of `used`.
  template <class Then>
  void make_room(const tier_state& s, ticks_t now, tier_id t, bytes_t more, const std::vector<value_id>& used, value_id first,
                 const Then& then) {
    if (room(s, t) >= more) return then(s, now);
    for (auto v = first; v < values_; ++v) {
      if (!on(s, v, t) || bytes(v) == 0 || (p_.values()[v].held && p_.values()[v].starts == t)) continue;
      if (std::find(used.begin(), used.end(), v) != used.end()) continue;
      const ticks_t quiet = std::max(s.cells[cell(v, t)], s.cells[cell(v, t) + 1]);
      auto next = s;
      leave(next, v, t);
      if (t != device_tier) raise(next.cells[floors() + t], quiet);
      const auto passed = t == device_tier ? quiet : 0;
      make_room(later(std::move(next), passed), now + passed, t, more, used, v + 1, then);
    }
  }
  void compute(const tier_state& s, ticks_t now, operation_id o) {
    const auto& op = p_.operations()[o];
    const auto t = op.on;
    if (s.cells[runs() + o] && (op.once || !op.overwrites.empty())) return;
    ticks_t first = t == device_tier ? 0 : std::max(s.cells[frees() + t], s.cells[floors() + t]);
    for (auto v : op.inputs) first = std::max<ticks_t>(first, s.cells[cell(v, t)]);
    for (const auto& x : op.overwrites) first = std::max<ticks_t>(first, s.cells[cell(x.input, t) + 1]);
    const auto last = first + ticks(op.seconds);
    auto next = s;
    if (op.once || !op.overwrites.empty()) next.cells[runs() + o] = 1;
    bool frees_room = op.workspace > 0;
    if (t != device_tier)
      for (auto v : op.inputs) raise(next.cells[cell(v, t) + 1], last);
    for (const auto& x : op.overwrites) leave(next, x.input, t);
    for (auto v : op.outputs) {
      frees_room = frees_room || on(next, v, t);
      const auto busy = next.cells[cell(v, t) + 1];
      put(next, v, t, last);
      raise(next.cells[cell(v, t) + 1], busy);
    }
    if (t == device_tier) return reach(std::move(next), now, last);
    next.cells[frees() + t] = static_cast<std::int32_t>(last);
    if (frees_room) raise(next.cells[floors() + t], last);
    reach(std::move(next), now);
  }
  void copy(const tier_state& s, ticks_t now, value_id v, std::size_t l) {
    const auto& link = p_.links()[l];
    auto next = s;
    auto& queue = next.cells[queues() + streams_[l]];
    auto last = std::max<ticks_t>(queue, s.cells[cell(v, link.from)]);
    if (link.to != device_tier) last = std::max<ticks_t>(last, s.cells[floors() + link.to]);
    last += ticks(link.latency + static_cast<double>(bytes(v)) / link.rate);
    queue = static_cast<std::int32_t>(last);
    raise(next.cells[cell(v, link.from) + 1], last);
    put(next, v, link.to, last);
    reach(std::move(next), now);
  }
  using entry = std::pair<ticks_t, const tier_state*>;
  struct later_first {
    bool operator()(const entry& a, const entry& b) const { return a.first > b.first; }
  };

  const problem& p_;
  const bytes_t budget_;
  const double tick_;
  const std::size_t most_, tiers_, values_;
  const std::vector<operation_id> needed_ = needed_operations(p_);
  std::vector<bool> wanted_;          // by value: something reads it, or it is a target
  std::vector<std::size_t> streams_;  // by link
  std::priority_queue<entry, std::vector<entry>, later_first> queue_;
  std::unordered_map<tier_state, ticks_t, tier_state_hash> least_;
  ticks_t best_ = never;
};

}  // namespace detail

/// The least time of any schedule of `p`, which is not cyclic, within the budgets of all tiers.
/// @param p      some five operations; more get slow
/// @param budget bytes, of the device
/// @param tick   of which all times are multiples, s
/// @param most   states; beyond that the search gives up
/// @return the optimum, s, infinity if no schedule fits; nothing if there are too many states
/// @throws bad_option if the problem is cyclic, or a held value may start anywhere
/// Complexity: O(states (values links + operations)).
/// @code
/// auto best = remat::testing::exhaustive_optimum_on_tiers(p, 12);
/// @endcode
inline std::optional<double> exhaustive_optimum_on_tiers(const problem& p, bytes_t budget, double tick = 1.0 / 840,
                                                         std::size_t most = 60'000) {
  return detail::tier_search(p, budget, tick, most).run();
}

}  // namespace remat::testing
