// SPDX-License-Identifier: Apache-2.0
/// @file
/// The algorithm of `schedule_copies`: a walk along an order of computations that decides which values are offloaded, evicted and
/// prefetched, and when. One walk with one state: longer than 400 lines.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include <remat/copies/host_state.hpp>
#include <remat/copies/look_ahead.hpp>
#include <remat/copies/order_with_copies.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/range_peak.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies {

namespace detail {

/// Lays copies over an order of computations, one position after the other. See `schedule_copies`.
/// Complexity: O((computations + uses of values + copies) log values), and O(values) for each copy that has to make room on the
/// host.
class copy_walk {
 public:
  /// @param budget bytes of the device
  /// @param where  where values start and end, for a problem that is not plain
  copy_walk(const problem& p, std::span<const operation_id> order, bytes_t budget, const copy_options& o,
            std::optional<placement> where = std::nullopt)
      : p_(p),
        order_(order),
        budget_(budget),
        small_(static_cast<bytes_t>(o.small * static_cast<double>(budget))),
        max_seconds_(o.max_seconds),
        departures_(o.departures),
        stop_(o.stop),
        end_(order.size()),
        up_(*p.link(device_tier, where ? where->far : p.host())),
        down_(*p.link(where ? where->far : p.host(), device_tier)),
        down_free_(up_.stream == down_.stream ? up_free_ : own_down_free_),
        values_(p.values().size()),
        ahead_(p, order, where ? &*where : nullptr, values_),
        memory_(ahead_.memory) {
    if (where) host_.emplace(p, std::move(*where), order, values_, laid_.schedule);
    if (o.frugal) unsent_memory_.emplace(memory_);
  }

  copy_walk(const copy_walk&) = delete;  // members refer to each other

  /// To be called once. @return nothing if no schedule was found, or if `stop` or `max_seconds` ended the walk
  std::optional<order_with_copies> lay() {
    if (at_start_ > budget_ || ahead_.at_end > budget_ || (host_ && !host_->take(0, 0, true))) return std::nullopt;
    for (value_id v = 0; v < values_.size(); ++v)
      if (p_.is_source(v)) begin_with(v);
    if (host_ && !host_->cyclic) start_here();
    auto next = ahead_.uses.begin();
    for (std::size_t i = 0; i < end_; ++i) {
      if (i % copy_options::polled_every == copy_options::polled_every - 1 && stop_ && stop_()) return std::nullopt;
      const auto& op = p_.operations()[order_[i]];
      if (op.on != device_tier) {
        if (!host_->has_run(order_[i]) && !run_on_host(order_[i], i)) return std::nullopt;
        continue;
      }
      if (!make_room(i)) return std::nullopt;
      for (auto v : op.inputs)
        if (!values_[v].here) fetch(v, i);
      bring_back(i);
      write_back(i);
      if (host_ && !advance_host(i)) return std::nullopt;
      for (auto v : op.inputs) wait(values_[v].arrives, i, true);
      for (const auto& x : op.overwrites) wait(values_[x.input].leaves, i, false);
      now_ += op.seconds;
      if (now_ + (ahead_.begins[end_] - ahead_.begins[i + 1]) > max_seconds_) return std::nullopt;
      laid_.schedule.compute(order_[i]);
      if (host_)
        for (auto v : op.outputs)
          if (values_[v].here) forget(v, i + 1);
      settle(i + 1);
      for (const auto& x : op.overwrites) lose(x.input);
      for (auto v : op.inputs) touch(v, *next++, i + 1);
      for (auto v : op.outputs) {
        values_[v].here = true;
        values_[v].arrives = 0;
        touch(v, *next++, i + 1);
      }
      if (host_ && !advance_host(i + 1)) return std::nullopt;
    }
    if (host_ && !make_room(end_)) return std::nullopt;
    while (!list_of(state::absent).empty()) fetch(list_of(state::absent).begin()->second, end_);
    if (host_ && !finish()) return std::nullopt;
    if (!host_ || !host_->cyclic)
      for (auto v : p_.targets())
        if (values_[v].next == end_) wait(values_[v].arrives, end_, true);
    wait(host_end_, end_, false);
    laid_.seconds = now_;
    std::vector<bool> read(values_.size(), false);
    for (value_id v = 0; host_ && v < values_.size(); ++v) read[v] = ends_on_host(v);
    drop_useless_offloads(p_, laid_.schedule, std::move(read));
    return std::move(laid_);
  }
  /// Before `lay`: bytes on the device at each position if no value leaves. A value that starts on the host counts from its next
  /// use on.
  const range_peak& memory() const { return memory_; }
  /// After `lay`: true if `v` is on the device at the end.
  bool here(value_id v) const { return values_[v].here; }

 private:
  using state = value_state;
  static constexpr auto never = state::never;
  using by_use = std::set<std::pair<std::size_t, value_id>>;

  struct copy {
    double end;
    value_id value;
  };

  double seconds(std::size_t i) const {
    const auto& op = p_.operations()[order_[i]];
    return op.on == device_tier ? op.seconds : 0;
  }
  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }
  bool held(value_id v) const { return p_.values()[v].held && (!host_ || host_->where.homes[v] == device_tier); }
  departure departs(value_id v) const { return departures_.empty() ? departure::in_turn : departures_[v]; }
  bool movable(value_id v) const { return bytes(v) > 0 && !held(v) && p_.values()[v].movable && departs(v) != departure::never; }
  /// True if the device no longer uses `v`, but the host must have it.
  bool must_go(value_id v) const { return values_[v].next == end_ + 1 && host_->must_go(v); }
  double to_host(value_id v) const { return up_.latency + static_cast<double>(bytes(v)) / up_.rate; }
  double to_device(value_id v) const { return down_.latency + static_cast<double>(bytes(v)) / down_.rate; }
  by_use& list_of(state::list l) { return lists_[l]; }
  /// Sort key of a value in its list: its next use. In `unsent`, values with `departure::first` come behind all others, because
  /// values are offloaded from the end of the list.
  std::pair<std::size_t, value_id> place(value_id v, state::list l) const {
    return {values_[v].next + (l == state::unsent && departs(v) == departure::first ? end_ + 2 : 0), v};
  }

  void move_to(value_id v, state::list l) {
    auto& x = values_[v];
    if (x.in != state::none) list_of(x.in).erase(place(v, x.in));
    x.in = l;
    if (l != state::none) list_of(l).insert(place(v, l));
  }
  /// The longest time without a use of `v`, from position i until `v` is computed again, s.
  double pause(value_id v, std::size_t i) const {
    return std::max(values_[v].pause, ahead_.begins[values_[v].next] - ahead_.begins[i]);
  }
  /// Puts a value that is on the device into the list of its state. Evicts a value that must go, once its copy to the host has
  /// ended.
  void file(value_id v, std::size_t i) {
    const auto& x = values_[v];
    if (x.arrives > now_ || x.leaves > now_) return move_to(v, state::none);
    if (x.leaves >= 0) return must_go(v) ? evict(v, i) : move_to(v, state::ready);
    const bool worth = must_go(v) || (pause(v, i) > to_host(v) + to_device(v) && bytes(v) >= small_);
    move_to(v, worth ? state::unsent : state::kept);
  }
  /// Updates a value that was made or used just before position i. Drops the value after its last use.
  void touch(value_id v, value_use later, std::size_t i) {
    move_to(v, state::none);
    auto& x = values_[v];
    x.next = later.next, x.pause = later.pause;
    if (held(v)) return;
    if (x.next == never) return x.here ? drop(v, i) : void();
    if (!movable(v)) return;
    if (x.leaves >= 0 && unsent_memory_) unsent_memory_->add(i, x.next, -bytes(v));
    file(v, i);
  }
  /// Puts the values whose copies have ended by now into their lists.
  void settle(std::size_t i) {
    for (auto* copies : {&leaving_, &arriving_})
      while (!copies->empty() && copies->front().end <= now_) {
        const auto v = copies->front().value;
        copies->pop_front();
        if (values_[v].here && values_[v].next != never && values_[v].next >= i && (!host_ || movable(v))) file(v, i);
      }
  }
  void wait(double until, std::size_t i, bool arrival) {
    if (until <= now_) return;
    laid_.waits.push_back({i, until - now_, until, arrival});
    now_ = until;
    settle(i);
  }
  void drop(value_id v, std::size_t i) {
    values_[v].here = false;
    wait(values_[v].leaves, i, false);
    wait(values_[v].arrives, i, true);
    laid_.schedule.drop(v);
    lose(v);
  }
  void lose(value_id v) {
    values_[v].here = false;
    values_[v].arrives = 0;
    if (host_) host_->changed(v);
  }
  void evict(value_id v, std::size_t i) {
    const auto next = values_[v].next;
    move_to(v, next <= end_ ? state::absent : state::none);
    memory_.add(i, next, -bytes(v));
    if (host_ && next <= end_ && !p_.is_source(v)) host_->hold(v, now_);
    drop(v, i);
  }
  /// Removes `v` before a computation makes it again, while the earlier result still waits for its copy to the host.
  void forget(value_id v, std::size_t i) {
    values_[v].here = false;
    move_to(v, state::none);
    memory_.add(i, end_ + 1, -bytes(v));
    if (unsent_memory_ && values_[v].leaves < 0) unsent_memory_->add(i, end_ + 1, -bytes(v));
  }
  /// Offloads `v`.
  /// @param urgent makes room on the host if the host is full
  /// @return false if the host has no room
  bool send(value_id v, std::size_t i, bool urgent) {
    auto& x = values_[v];
    if (host_ && !take_on_host(bytes(v), i, urgent)) return false;
    const double begin = std::max({now_, up_free_, x.arrives, host_ ? host_->room_from() : 0});
    x.leaves = up_free_ = begin + to_host(v);
    move_to(v, state::none);
    leaving_.push_back({x.leaves, v});
    copy_step(v, action::offload);
    laid_.to_host.push_back({v, x.next, begin, x.leaves});
    if (unsent_memory_ && x.next != never) unsent_memory_->add(i, x.next, -bytes(v));
    if (host_) host_->changed(v), host_->hold(v, now_);
    return true;
  }
  /// Reserves `more` bytes on the host. If that is urgent and the host is full, drops copies of values that are also on the
  /// device, soonest next use first, because these values would not be evicted soon. If that is not enough, prefetches absent
  /// values as far as the device has room, and drops their copies.
  /// @return false if the host has no room
  bool take_on_host(bytes_t more, std::size_t i, bool urgent) {
    if (host_->take(more, now_, urgent)) return true;
    if (!urgent) return false;
    const auto values_of = [&](state::list l) {
      std::vector<value_id> values;
      for (const auto& x : list_of(l)) values.push_back(x.second);
      return values;
    };
    auto copied = values_of(state::ready);
    for (const auto* copies : {&arriving_, &leaving_})
      for (const auto& c : *copies) copied.push_back(c.value);
    for (auto v : copied)
      if (give_up(v, i) && host_->take(more, now_, true)) return true;
    for (auto v : values_of(state::absent)) {
      if (std::max(memory_.at(i), memory_.max(i, values_[v].next) + bytes(v)) > budget_) continue;
      fetch(v, i);
      if (give_up(v, i) && host_->take(more, now_, true)) return true;
    }
    return false;
  }
  /// Drops the copy on the host of a value that is on the device. @return false if the copy has to stay
  bool give_up(value_id v, std::size_t i) {
    if (!host_->may_give_up(v)) return false;
    auto& x = values_[v];
    host_->give_up(v);
    if (unsent_memory_ && x.next != never) unsent_memory_->add(i, x.next, bytes(v));
    if (x.in == state::ready) move_to(v, state::kept);
    return true;
  }
  void fetch(value_id v, std::size_t i) {
    auto& x = values_[v];
    const double begin = std::max({now_, down_free_, x.leaves});
    x.arrives = down_free_ = begin + to_device(v);
    move_to(v, state::none);
    x.here = true;
    arriving_.push_back({x.arrives, v});
    copy_step(v, action::prefetch);
    laid_.to_device.push_back({v, x.next, begin, x.arrives});
    memory_.add(i, x.next, bytes(v));
    if (host_) host_->read(v, x.arrives), host_->release(v, now_);
  }
  void copy_step(value_id v, action a) {
    if (!host_ || p_.host() == host_->where.far)
      laid_.schedule.steps.push_back({a, v});
    else if (a == action::offload)
      laid_.schedule.copy(v, device_tier, host_->where.far);
    else
      laid_.schedule.copy(v, host_->where.far, device_tier);
  }

  /// Makes room on the device until position i fits the budget. Among the values with a copy on the host, evicts the one whose
  /// next use is furthest away. If there is none, waits for the first copy in flight to end. If no copy is in flight, offloads
  /// the value whose next use is furthest away.
  /// @return false if no value can be offloaded
  bool make_room(std::size_t i) {
    const auto last = [&](state::list l) {
      const auto& values = list_of(l);
      const auto idle = std::find_if(values.rbegin(), values.rend(), [&](const auto& x) { return values_[x.second].next > i; });
      return idle == values.rend() ? value_id(none) : idle->second;
    };
    const auto first_copied = [&](const std::deque<copy>& copies) {
      const auto in_flight = std::find_if(copies.begin(), copies.end(), [&](const copy& c) {
        const auto& x = values_[c.value];
        return x.here && x.next != never && x.next > i && c.end == std::max(x.leaves, x.arrives);
      });
      return in_flight == copies.end() ? std::numeric_limits<double>::infinity() : in_flight->end;
    };
    while (memory_.at(i) > budget_) {
      if (const auto v = last(state::ready); v != none) {
        evict(v, i);
        continue;
      }
      const double leaves = first_copied(leaving_), arrives = first_copied(arriving_);
      if (std::min(leaves, arrives) < std::numeric_limits<double>::infinity()) {
        wait(std::min(leaves, arrives), i, arrives < leaves);
        settle(i);  // `wait` does nothing if the copy has already ended
        continue;
      }
      auto v = last(state::unsent);
      if (v == none) v = last(state::kept);
      if (v == none || !send(v, i, true)) return false;
    }
    return true;
  }

  /// Prefetches absent values, next use first, as long as the link would be idle before computation i ends.
  void bring_back(std::size_t i) {
    while (!list_of(state::absent).empty() && down_free_ < now_ + seconds(i)) {
      const auto [next, v] = *list_of(state::absent).begin();
      if (host_ && values_[v].leaves > now_ && values_[v].leaves >= now_ + seconds(i)) return;  // not yet complete on the host
      if (memory_.max(i, next) + bytes(v) > budget_ && !(due(i, v) && swap_out(i, next, bytes(v)))) return;
      fetch(v, i);
    }
  }
  /// True if one of the next absent values would be late if the first of them, v, waited any longer.
  bool due(std::size_t i, value_id v) {
    double slack = std::numeric_limits<double>::infinity(), transfers = 0;
    int looked = 64;
    for (const auto& [next, x] : list_of(state::absent)) {
      if (looked-- == 0) break;
      transfers += to_device(x);
      slack = std::min(slack, ahead_.begins[next] - transfers);
    }
    return slack - ahead_.begins[i] <= seconds(i) + 2 * to_device(v);
  }
  /// Makes room at position i for a value that is used at `next`: evicts values on the host that are used after `next`. Their
  /// bytes must also cover the room that is lacking at the positions before `next`, where the walk can evict them later.
  /// @return false if they do not; nothing is evicted then
  bool swap_out(std::size_t i, std::size_t next, bytes_t size) {
    auto& ready = list_of(state::ready);
    auto lacking = memory_.max(i, next) + size - budget_;
    for (auto x = ready.rbegin(); lacking > 0 && x != ready.rend() && x->first > next; ++x) lacking -= bytes(x->second);
    if (lacking > 0) return false;
    while (memory_.at(i) + size > budget_) evict(ready.rbegin()->second, i);
    return true;
  }
  /// Offloads values as long as the link would be idle before computation i ends: first those with `departure::first`, then those
  /// whose next use is furthest away. A value moves to `kept` if it would be back too late, or if `frugal` and the budget does
  /// not require its copy.
  void write_back(std::size_t i) {
    auto& unsent = list_of(state::unsent);
    while (!unsent.empty() && up_free_ < now_ + seconds(i)) {
      const auto v = unsent.rbegin()->second;
      const auto next = values_[v].next;
      const bool late = std::max(now_, up_free_) + to_host(v) + to_device(v) > now_ + pause(v, i);
      if (!must_go(v) && (late || (unsent_memory_ && unsent_memory_->max(i, next) <= budget_)))
        move_to(v, state::kept);
      else if ((host_ && !must_go(v) && !host_->has_room_for(v, now_)) || !send(v, i, false))
        return;
    }
  }
  /// Puts a source where it starts.
  void begin_with(value_id v) {
    auto& x = values_[v];
    x.here = !host_ || host_->where.homes[v] == device_tier;
    if (p_.values()[v].starts == any_tier) laid_.schedule.starts.push_back({v, host_->where.homes[v]});
    if (x.here) return touch(v, {x.next, x.pause}, 0);
    x.leaves = 0;
    if (x.next != never) move_to(v, state::absent);
    host_->changed(v);
  }
  /// Lets sources that may start anywhere start on the device if the device has room for them until their first use.
  void start_here() {
    for (auto& [v, tier] : laid_.schedule.starts) {
      auto& x = values_[v];
      const auto readers = p_.consumers(v);
      const auto on_host = [&](operation_id o) { return p_.operations()[o].on != device_tier; };
      if (x.in != state::absent || p_.values()[v].held || host_->where.ends[v] != placement::place::nowhere) continue;
      if (std::any_of(readers.begin(), readers.end(), on_host) || at_start_ + bytes(v) > budget_) continue;
      if (memory_.max(0, x.next) + bytes(v) > budget_) continue;
      tier = device_tier;
      at_start_ += bytes(v);
      memory_.add(0, x.next, bytes(v));
      if (unsent_memory_) unsent_memory_->add(0, x.next, bytes(v));
      host_->give(bytes(v));
      x.here = true;
      x.leaves = -1;
      touch(v, {x.next, x.pause}, 0);
    }
  }
  /// Runs the operations on the host that are ready, and drops what the host no longer needs. @return false if it has no room
  bool advance_host(std::size_t i) {
    while (const auto o = host_->next_ready())
      if (!run_on_host(*o, i)) return false;
    host_->tidy(now_);
    return true;
  }
  /// Offloads the inputs of an operation on the host and runs the operation there. @return false if the host has no room
  bool run_on_host(operation_id o, std::size_t i) {
    const auto& op = p_.operations()[o];
    for (auto v : op.inputs)
      if (values_[v].leaves < 0 && !send(v, i, true)) return false;
    for (const auto& x : op.overwrites)
      if (values_[x.input].here) evict(x.input, i);
    if (!take_on_host(p_.new_bytes(o), i, true)) return false;
    host_->run(o, now_);
    for (auto v : op.outputs) {
      if (values_[v].next <= end_) move_to(v, state::absent);
    }
    return true;
  }
  /// Offloads all values that must end on the host. In a cyclic schedule, also drops the values that must not be left over.
  /// @return false if the host has no room
  bool finish() {
    for (value_id v = 0; v < values_.size(); ++v) {
      auto& x = values_[v];
      if (!x.here || x.next != end_ + 1 || !must_go(v)) continue;
      if (x.leaves < 0 && !send(v, end_, true)) return false;
    }
    for (value_id v = 0; v < values_.size(); ++v)
      if (host_->cyclic && values_[v].here && values_[v].next == end_ + 1 && must_go(v)) drop(v, end_);
    for (auto v : p_.targets())
      if (!host_->cyclic && ends_on_host(v)) host_end_ = std::max(host_end_, values_[v].leaves);
    host_->clear();
    return true;
  }
  bool ends_on_host(value_id v) const {
    const auto end = host_->where.ends[v];
    return end == placement::place::host || (end == placement::place::anywhere && !values_[v].here);
  }
  const problem& p_;
  std::span<const operation_id> order_;
  bytes_t budget_, small_;
  double max_seconds_;
  std::vector<departure> departures_;
  std::function<bool()> stop_;
  std::size_t end_;
  const copy_link &up_, &down_;
  double now_ = 0, up_free_ = 0, own_down_free_ = 0, host_end_ = 0;
  double& down_free_;
  std::vector<state> values_;
  look_ahead ahead_;
  range_peak memory_;  // bytes at each position if no value leaves from now on, and absent values come back at their next use
  bytes_t at_start_ = ahead_.at_start;
  order_with_copies laid_;
  std::optional<host_state> host_;           // only for problems that are not plain
  std::optional<range_peak> unsent_memory_;  // only if frugal: the part of `memory_` that has no copy on the host
  std::array<by_use, state::none> lists_;
  std::deque<copy> leaving_, arriving_;  // in flight, first end first
};

}  // namespace detail

}  // namespace remat::copies
