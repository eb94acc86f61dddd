// SPDX-License-Identifier: Apache-2.0
/// @file
/// Demand paging on several tiers: a value is copied to a tier when an operation there reads it, and evicted when room is
/// lacking. The simplest way to lay copies.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include <remat/copies/order_with_copies.hpp>
#include <remat/copies/placement.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies::detail {

/// Demand paging over all tiers and links. A full tier evicts, in this order: values without a further use, values with a copy on
/// another tier, and the value whose next use is furthest away. A value of the last kind first moves to another tier, which may
/// evict other values for it.
/// Complexity: O((uses of values + copies) tiers log(uses + copies) + copies tiers links).
class demand_paging {
 public:
  /// @param p          a problem that is not plain and not `why_unplannable`; must outlive this
  /// @param order      a result of `readers_before_overwrites`
  /// @param budget     bytes of the device
  /// @param start_near sources that may start anywhere start as near to the device as there is room; false: as far away
  /// @param stop       polled now and then; true gives up
  demand_paging(const problem& p, std::span<const operation_id> order, bytes_t budget, bool start_near,
                std::function<bool()> stop = {})
      : p_(p),
        order_(order),
        stop_(std::move(stop)),
        live_(p.tiers().size(), 0),
        arrival_number_(live_.size(), std::vector<std::size_t>(p.values().size(), 0)),
        candidates_(live_.size()),
        making_room_(live_.size(), false),
        on_(p.values().size()),
        pinned_(on_),
        next_index_(on_.size(), 0),
        uses_(on_.size()),
        home_(on_.size(), any_tier),
        end_(on_.size(), any_tier),
        stays_to_end_(on_.size(), false) {
    for (tier_id t = 0; t < live_.size(); ++t) budget_.push_back(t == device_tier ? budget : p.capacity(t));
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto& op = p.operations()[order[i]];
      for (auto v : op.inputs) uses_[v].push_back({i, true});
      for (auto v : op.outputs) uses_[v].push_back({i, false});
    }
    place_sources(start_near);
  }

  /// To be called once. @return a schedule without times; nothing if a tier has no room, or if `stop` made it give up
  std::optional<order_with_copies> lay() {
    for (tier_id t = 0; t < live_.size(); ++t)
      if (live_[t] > budget_[t]) return std::nullopt;
    while (position_ < order_.size()) {
      if (position_ % copy_options::polled_every == copy_options::polled_every - 1 && stop_ && stop_()) return std::nullopt;
      const auto o = order_[position_];
      if (!compute(o)) return std::nullopt;
      ++position_;
      for (const auto* used : {&p_.operations()[o].inputs, &p_.operations()[o].outputs})
        for (auto v : *used) update_rank(v);
    }
    if (!finish()) return std::nullopt;
    return std::move(laid_);
  }

 private:
  struct use {
    std::size_t position;
    bool read;  // true: an operation reads the value; false: it makes the value
  };

  /// A value on a tier. The greatest candidate is evicted first. Its rank has three parts:
  /// - 2: no further use; 1: also on another tier; 0: only here;
  /// - the next use;
  /// - the complement of `arrival_number_`, so the value that came first is the greatest.
  struct candidate {
    std::array<std::size_t, 3> rank;
    value_id v;
    bool operator<(const candidate& other) const { return rank < other.rank; }
    friend bool operator==(const candidate&, const candidate&) = default;
  };

  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }
  bool on(value_id v, tier_id t) const { return on_[v].has(t); }
  bool never_leaves(value_id v, tier_id t) const { return (p_.values()[v].held && home_[v] == t) || bytes(v) == 0; }
  /// Position of the next use of `v` before it is made again. The length of the order: `v` is wanted at the end. The length + 1:
  /// no further use.
  std::size_t next_use(value_id v) {
    auto& i = next_index_[v];
    while (i < uses_[v].size() && uses_[v][i].position < position_) ++i;
    if (i < uses_[v].size()) return uses_[v][i].read ? uses_[v][i].position : order_.size() + 1;
    return order_.size() + (stays_to_end_[v] ? 0 : 1);
  }
  candidate candidate_of(value_id v, tier_id t) {
    const auto n = next_use(v);
    return {{n > order_.size() ? 2u : on_[v] != tier_set(t), n, ~arrival_number_[t][v]}, v};
  }
  /// To be called when the rank of `v` has changed. Entries with its old rank stay in the queues; `make_room` skips them.
  void update_rank(value_id v) {
    for (tier_id t = 0; t < live_.size(); ++t)
      if (on(v, t) && !never_leaves(v, t)) candidates_[t].push(candidate_of(v, t));
  }

  void place_sources(bool start_near) {
    auto chain = tier_chain(p_);
    if (!start_near) std::reverse(chain.begin(), chain.end());
    const auto where = find_placement(p_, std::vector<tier_id>(on_.size(), chain.back()));
    std::vector<std::pair<std::size_t, value_id>> undecided;
    for (value_id v = 0; v < on_.size(); ++v) {
      if (!p_.is_source(v)) continue;
      if (where.undecided[v])
        undecided.push_back({uses_[v].empty() ? order_.size() : uses_[v].front().position, v});
      else
        add(v, home_[v] = where.homes[v]);
    }
    std::sort(undecided.begin(), undecided.end());
    if (!start_near) std::reverse(undecided.begin(), undecided.end());
    for (const auto& [first, v] : undecided) {
      const auto fits = [&, v = v](tier_id t) { return live_[t] + bytes(v) <= budget_[t]; };
      const auto t = std::find_if(chain.begin(), chain.end(), fits);
      add(v, home_[v] = t == chain.end() ? chain.back() : *t);
    }
    std::vector<bool> replaced(on_.size(), false);
    for (auto v : p_.targets()) {
      stays_to_end_[v] = true;
      end_[v] = p_.values()[v].ends;
    }
    for (const auto& c : p_.next()) {
      replaced[c.source] = true;
      end_[c.target] = home_[c.source];
    }
    for (value_id v = 0; v < on_.size(); ++v) {
      if (!p_.is_source(v)) continue;
      if (p_.values()[v].starts == any_tier) laid_.schedule.starts.push_back({v, home_[v]});
      if (p_.next().empty() || replaced[v]) continue;
      stays_to_end_[v] = true;
      end_[v] = home_[v];
    }
    for (value_id v = 0; v < on_.size(); ++v) update_rank(v);
  }

  void add(value_id v, tier_id t) {
    if (on(v, t)) return;
    on_[v].add(t);
    live_[t] += bytes(v);
    arrival_number_[t][v] = ++arrivals_;
    update_rank(v);
  }
  void remove(value_id v, tier_id t) {
    on_[v].remove(t);
    live_[t] -= bytes(v);
    update_rank(v);
  }
  void drop(value_id v, tier_id t) {
    remove(v, t);
    laid_.schedule.drop(v, t);
  }
  /// Copies `v`, evicting other values for it if necessary. @return false if `to` has no room
  bool copy(value_id v, tier_id from, tier_id to) {
    const auto pinned = pinned_[v];
    pinned_[v].add(from);
    const bool room = make_room(to, bytes(v));
    pinned_[v] = pinned;
    if (!room) return update_rank(v), false;
    add(v, to);
    laid_.schedule.copy(v, from, to);
    if (from == device_tier || to == device_tier)
      (from == device_tier ? laid_.to_host : laid_.to_device).push_back({v, next_use(v), 0, 0});
    return true;
  }

  bool make_room(tier_id t, bytes_t more) {
    const auto lacking = [&] { return live_[t] + more > budget_[t]; };
    if (making_room_[t]) return false;  // a nested call would take the room that the outer call makes
    if (!lacking()) return true;
    making_room_[t] = true;
    std::vector<candidate> kept_back;
    for (auto& queue = candidates_[t]; lacking() && !queue.empty();) {
      const auto best = queue.top();
      queue.pop();
      if (!on(best.v, t) || best != candidate_of(best.v, t) ||
          std::find(kept_back.begin(), kept_back.end(), best) != kept_back.end())
        continue;
      const bool pinned = pinned_[best.v].has(t);
      if (!pinned && (best.rank[0] > 0 || move_away(best.v, t)))
        drop(best.v, t);
      else if (!pinned || position_ < order_.size())  // at the end, a pinned value is where it must be: no candidate any more
        kept_back.push_back(best);
    }
    for (const auto& c : kept_back) candidates_[t].push(c);
    making_room_[t] = false;
    return !lacking();
  }
  bool move_away(value_id v, tier_id t) {
    if (!p_.values()[v].movable) return false;
    const auto links = p_.links();
    return std::any_of(links.begin(), links.end(), [&](const copy_link& l) {
      return l.from == t && !fastest_path(tier_set(l.to), t, {}, v).empty() && copy(v, t, l.to);
    });
  }
  /// The fastest path of `v` from any tier of `from` to `to` that does not enter a tier of `closed`.
  /// @return its links, the last link first; empty if there is no path
  std::vector<const copy_link*> fastest_path(tier_set from, tier_id to, tier_set closed, value_id v) const {
    std::vector<double> seconds(live_.size(), std::numeric_limits<double>::infinity());
    std::vector<const copy_link*> via(live_.size(), nullptr);
    for (tier_id t = 0; t < seconds.size(); ++t)
      if (from.has(t)) seconds[t] = 0;
    for (std::size_t round = 1; round < seconds.size(); ++round)
      for (const auto& l : p_.links()) {
        const double arrival = seconds[l.from] + l.latency + static_cast<double>(bytes(v)) / l.rate;
        if (!closed.has(l.to) && arrival < seconds[l.to]) seconds[l.to] = arrival, via[l.to] = &l;
      }
    std::vector<const copy_link*> path;
    for (auto t = to; via[t]; t = via[t]->from) path.push_back(via[t]);
    return path;
  }
  /// Copies `v` to tier `t`, on a path around full tiers. @return false if there is no such path
  bool bring_to(value_id v, tier_id t) {
    for (tier_set closed; !on(v, t);) {
      const auto links = fastest_path(on_[v], t, closed, v);
      if (links.empty()) return false;
      const auto full = std::find_if_not(links.rbegin(), links.rend(), [&](auto l) { return copy(v, l->from, l->to); });
      if (full != links.rend()) closed.add((*full)->to);
    }
    return true;
  }

  bool compute(operation_id o) {
    const auto& op = p_.operations()[o];
    for (auto v : op.outputs)
      if (on(v, op.on)) drop(v, op.on);
    for (auto v : op.inputs) pinned_[v].add(op.on);
    const bool fits = std::all_of(op.inputs.begin(), op.inputs.end(), [&](value_id v) { return bring_to(v, op.on); }) &&
                      make_room(op.on, p_.new_bytes(o));
    for (auto v : op.inputs) pinned_[v] = {};
    if (!fits) return false;
    laid_.schedule.compute(o);
    for (const auto& x : op.overwrites) remove(x.input, op.on);
    for (auto v : op.outputs) add(v, op.on);
    return true;
  }

  /// Copies all values to where they must end. If a tier is full, its values wait until others have left. In a cyclic schedule,
  /// also drops all values that must not be left over. @return false if some tier has no room
  bool finish() {
    std::vector<value_id> waiting;
    for (value_id v = 0; v < on_.size(); ++v) {
      if (end_[v] == any_tier) continue;
      pinned_[v] = tier_set(end_[v]);
      if (!on(v, end_[v])) waiting.push_back(v);
    }
    while (!waiting.empty())
      if (std::erase_if(waiting, [&](value_id v) { return bring_to(v, end_[v]); }) == 0) return false;
    for (tier_id t = 0; t < live_.size() && !p_.next().empty(); ++t)
      for (value_id v = 0; v < on_.size(); ++v)
        if (on(v, t) && (!stays_to_end_[v] || (end_[v] != any_tier && end_[v] != t))) drop(v, t);
    return true;
  }

  const problem& p_;
  const std::span<const operation_id> order_;
  std::function<bool()> stop_;
  std::vector<bytes_t> budget_, live_;
  std::vector<std::vector<std::size_t>> arrival_number_;  // by tier and value: sequence number of its arrival
  std::vector<std::priority_queue<candidate>> candidates_;
  std::vector<bool> making_room_;
  std::vector<tier_set> on_, pinned_;    // of each value: tiers where it is, and tiers that must not evict it
  std::vector<std::size_t> next_index_;  // of each value: index into its `uses_`
  std::vector<std::vector<use>> uses_;
  std::vector<tier_id> home_, end_;
  std::vector<bool> stays_to_end_;
  std::size_t position_ = 0, arrivals_ = 0;
  order_with_copies laid_;
};

}  // namespace remat::copies::detail
