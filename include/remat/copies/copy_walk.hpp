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
        min_bytes_(static_cast<bytes_t>(o.small * static_cast<double>(budget))),
        max_seconds_(o.max_seconds),
        departures_(o.departures),
        stop_(o.stop),
        end_(order.size()),
        to_host_link_(*p.link(device_tier, where ? where->neighbour : p.host())),
        to_device_link_(*p.link(where ? where->neighbour : p.host(), device_tier)),
        to_device_free_(to_host_link_.stream == to_device_link_.stream ? to_host_free_ : own_to_device_free_),
        values_(p.values().size()),
        ahead_(p, order, where ? &*where : nullptr, values_),
        memory_(ahead_.memory) {
    if (where) host_.emplace(p, std::move(*where), order, values_, laid_.schedule);
    if (o.frugal) device_only_memory_.emplace(memory_);
  }

  copy_walk(const copy_walk&) = delete;  // members refer to each other

  /// To be called once. @return nothing if no schedule was found, or if `stop` or `max_seconds` ended the walk
  std::optional<order_with_copies> lay() {
    if (start_bytes_ > budget_ || ahead_.end_bytes > budget_ || (host_ && !host_->reserve(0, 0, true))) return std::nullopt;
    for (value_id v = 0; v < values_.size(); ++v)
      if (p_.is_source(v)) place_source(v);
    if (host_ && !host_->cyclic) start_on_device();
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
        if (!values_[v].on_device) prefetch(v, i);
      prefetch_ahead(i);
      offload_ahead(i);
      if (host_ && !advance_host(i)) return std::nullopt;
      for (auto v : op.inputs) wait(values_[v].on_device_at, i, true);
      for (const auto& x : op.overwrites) wait(values_[x.input].on_host_at, i, false);
      now_ += op.seconds;
      if (now_ + (ahead_.begins[end_] - ahead_.begins[i + 1]) > max_seconds_) return std::nullopt;
      laid_.schedule.compute(order_[i]);
      if (host_)
        for (auto v : op.outputs)
          if (values_[v].on_device) remove_before_recompute(v, i + 1);
      list_arrived(i + 1);
      for (const auto& x : op.overwrites) mark_absent(x.input);
      for (auto v : op.inputs) after_use(v, *next++, i + 1);
      for (auto v : op.outputs) {
        values_[v].on_device = true;
        values_[v].on_device_at = 0;
        after_use(v, *next++, i + 1);
      }
      if (host_ && !advance_host(i + 1)) return std::nullopt;
    }
    if (host_ && !make_room(end_)) return std::nullopt;
    while (!list_of(state::absent).empty()) prefetch(list_of(state::absent).begin()->second, end_);
    if (host_ && !finish()) return std::nullopt;
    if (!host_ || !host_->cyclic)
      for (auto v : p_.targets())
        if (values_[v].next_use == end_) wait(values_[v].on_device_at, end_, true);
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
  bool on_device_at_end(value_id v) const { return values_[v].on_device; }

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
  departure departure_of(value_id v) const { return departures_.empty() ? departure::in_turn : departures_[v]; }
  bool movable(value_id v) const {
    return bytes(v) > 0 && !held(v) && p_.values()[v].movable && departure_of(v) != departure::never;
  }
  /// True if the device no longer uses `v`, but the host must have it.
  bool must_offload(value_id v) const { return values_[v].next_use == end_ + 1 && host_->must_offload(v); }
  double offload_seconds(value_id v) const { return to_host_link_.latency + static_cast<double>(bytes(v)) / to_host_link_.rate; }
  double prefetch_seconds(value_id v) const {
    return to_device_link_.latency + static_cast<double>(bytes(v)) / to_device_link_.rate;
  }
  by_use& list_of(state::list l) { return lists_[l]; }
  /// Sort key of a value in its list: its next use. In `offloadable`, values with `departure::first` come behind all others,
  /// because values are offloaded from the end of the list.
  std::pair<std::size_t, value_id> list_key(value_id v, state::list l) const {
    return {values_[v].next_use + (l == state::offloadable && departure_of(v) == departure::first ? end_ + 2 : 0), v};
  }

  void move_to(value_id v, state::list l) {
    auto& x = values_[v];
    if (x.in_list != state::none) list_of(x.in_list).erase(list_key(v, x.in_list));
    x.in_list = l;
    if (l != state::none) list_of(l).insert(list_key(v, l));
  }
  /// The longest time without a use of `v`, from position i until `v` is computed again, s.
  double longest_pause(value_id v, std::size_t i) const {
    return std::max(values_[v].longest_pause, ahead_.begins[values_[v].next_use] - ahead_.begins[i]);
  }
  /// Puts a value that is on the device into the list of its state. Evicts a value that must go, once its copy to the host has
  /// ended.
  void update_list(value_id v, std::size_t i) {
    const auto& x = values_[v];
    if (x.on_device_at > now_ || x.on_host_at > now_) return move_to(v, state::none);
    if (x.on_host_at >= 0) return must_offload(v) ? evict(v, i) : move_to(v, state::evictable);
    const bool worth_copying =
        must_offload(v) || (longest_pause(v, i) > offload_seconds(v) + prefetch_seconds(v) && bytes(v) >= min_bytes_);
    move_to(v, worth_copying ? state::offloadable : state::offload_last);
  }
  /// Updates a value that was made or used just before position i. Drops the value after its last use.
  void after_use(value_id v, value_use later, std::size_t i) {
    move_to(v, state::none);
    auto& x = values_[v];
    x.next_use = later.next_use, x.longest_pause = later.longest_pause;
    if (held(v)) return;
    if (x.next_use == never) return x.on_device ? drop(v, i) : void();
    if (!movable(v)) return;
    if (x.on_host_at >= 0 && device_only_memory_) device_only_memory_->add(i, x.next_use, -bytes(v));
    update_list(v, i);
  }
  /// Puts the values whose copies have ended by now into their lists.
  void list_arrived(std::size_t i) {
    for (auto* copies : {&offloads_, &prefetches_})
      while (!copies->empty() && copies->front().end <= now_) {
        const auto v = copies->front().value;
        copies->pop_front();
        if (values_[v].on_device && values_[v].next_use != never && values_[v].next_use >= i && (!host_ || movable(v)))
          update_list(v, i);
      }
  }
  void wait(double until, std::size_t i, bool arrival) {
    if (until <= now_) return;
    laid_.waits.push_back({i, until - now_, until, arrival});
    now_ = until;
    list_arrived(i);
  }
  void drop(value_id v, std::size_t i) {
    values_[v].on_device = false;
    wait(values_[v].on_host_at, i, false);
    wait(values_[v].on_device_at, i, true);
    laid_.schedule.drop(v);
    mark_absent(v);
  }
  void mark_absent(value_id v) {
    values_[v].on_device = false;
    values_[v].on_device_at = 0;
    if (host_) host_->note_change(v);
  }
  void evict(value_id v, std::size_t i) {
    const auto next = values_[v].next_use;
    move_to(v, next <= end_ ? state::absent : state::none);
    memory_.add(i, next, -bytes(v));
    if (host_ && next <= end_ && !p_.is_source(v)) host_->start_waiting(v, now_);
    drop(v, i);
  }
  /// Removes `v` before a computation makes it again, while the earlier result still waits for its copy to the host.
  void remove_before_recompute(value_id v, std::size_t i) {
    values_[v].on_device = false;
    move_to(v, state::none);
    memory_.add(i, end_ + 1, -bytes(v));
    if (device_only_memory_ && values_[v].on_host_at < 0) device_only_memory_->add(i, end_ + 1, -bytes(v));
  }
  /// Offloads `v`.
  /// @param urgent makes room on the host if the host is full
  /// @return false if the host has no room
  bool offload(value_id v, std::size_t i, bool urgent) {
    auto& x = values_[v];
    if (host_ && !reserve_on_host(bytes(v), i, urgent)) return false;
    const double begin = std::max({now_, to_host_free_, x.on_device_at, host_ ? host_->room_from() : 0});
    x.on_host_at = to_host_free_ = begin + offload_seconds(v);
    move_to(v, state::none);
    offloads_.push_back({x.on_host_at, v});
    copy_step(v, action::offload);
    laid_.to_host.push_back({v, x.next_use, begin, x.on_host_at});
    if (device_only_memory_ && x.next_use != never) device_only_memory_->add(i, x.next_use, -bytes(v));
    if (host_) host_->note_change(v), host_->start_waiting(v, now_);
    return true;
  }
  /// Reserves `more` bytes on the host. If that is urgent and the host is full, drops copies of values that are also on the
  /// device, soonest next use first, because these values would not be evicted soon. If that is not enough, prefetches absent
  /// values as far as the device has room, and drops their copies.
  /// @return false if the host has no room
  bool reserve_on_host(bytes_t more, std::size_t i, bool urgent) {
    if (host_->reserve(more, now_, urgent)) return true;
    if (!urgent) return false;
    const auto values_of = [&](state::list l) {
      std::vector<value_id> values;
      for (const auto& x : list_of(l)) values.push_back(x.second);
      return values;
    };
    auto copied = values_of(state::evictable);
    for (const auto* copies : {&prefetches_, &offloads_})
      for (const auto& c : *copies) copied.push_back(c.value);
    for (auto v : copied)
      if (drop_host_copy(v, i) && host_->reserve(more, now_, true)) return true;
    for (auto v : values_of(state::absent)) {
      if (std::max(memory_.at(i), memory_.max(i, values_[v].next_use) + bytes(v)) > budget_) continue;
      prefetch(v, i);
      if (drop_host_copy(v, i) && host_->reserve(more, now_, true)) return true;
    }
    return false;
  }
  /// Drops the copy on the host of a value that is on the device. @return false if the copy has to stay
  bool drop_host_copy(value_id v, std::size_t i) {
    if (!host_->may_drop_copy(v)) return false;
    auto& x = values_[v];
    host_->drop_copy(v);
    if (device_only_memory_ && x.next_use != never) device_only_memory_->add(i, x.next_use, bytes(v));
    if (x.in_list == state::evictable) move_to(v, state::offload_last);
    return true;
  }
  void prefetch(value_id v, std::size_t i) {
    auto& x = values_[v];
    const double begin = std::max({now_, to_device_free_, x.on_host_at});
    x.on_device_at = to_device_free_ = begin + prefetch_seconds(v);
    move_to(v, state::none);
    x.on_device = true;
    prefetches_.push_back({x.on_device_at, v});
    copy_step(v, action::prefetch);
    laid_.to_device.push_back({v, x.next_use, begin, x.on_device_at});
    memory_.add(i, x.next_use, bytes(v));
    if (host_) host_->note_read(v, x.on_device_at), host_->end_waiting(v, now_);
  }
  void copy_step(value_id v, action a) {
    if (!host_ || p_.host() == host_->where.neighbour)
      laid_.schedule.steps.push_back({a, v});
    else if (a == action::offload)
      laid_.schedule.copy(v, device_tier, host_->where.neighbour);
    else
      laid_.schedule.copy(v, host_->where.neighbour, device_tier);
  }

  /// Makes room on the device until position i fits the budget. Among the values with a copy on the host, evicts the one whose
  /// next use is furthest away. If there is none, waits for the first copy in flight to end. If no copy is in flight, offloads
  /// the value whose next use is furthest away.
  /// @return false if no value can be offloaded
  bool make_room(std::size_t i) {
    const auto last = [&](state::list l) {
      const auto& values = list_of(l);
      const auto idle =
          std::find_if(values.rbegin(), values.rend(), [&](const auto& x) { return values_[x.second].next_use > i; });
      return idle == values.rend() ? value_id(none) : idle->second;
    };
    const auto first_end = [&](const std::deque<copy>& copies) {
      const auto in_flight = std::find_if(copies.begin(), copies.end(), [&](const copy& c) {
        const auto& x = values_[c.value];
        return x.on_device && x.next_use != never && x.next_use > i && c.end == std::max(x.on_host_at, x.on_device_at);
      });
      return in_flight == copies.end() ? std::numeric_limits<double>::infinity() : in_flight->end;
    };
    while (memory_.at(i) > budget_) {
      if (const auto v = last(state::evictable); v != none) {
        evict(v, i);
        continue;
      }
      const double offload_end = first_end(offloads_), prefetch_end = first_end(prefetches_);
      if (std::min(offload_end, prefetch_end) < std::numeric_limits<double>::infinity()) {
        wait(std::min(offload_end, prefetch_end), i, prefetch_end < offload_end);
        list_arrived(i);  // `wait` does nothing if the copy has already ended
        continue;
      }
      auto v = last(state::offloadable);
      if (v == none) v = last(state::offload_last);
      if (v == none || !offload(v, i, true)) return false;
    }
    return true;
  }

  /// Prefetches absent values, next use first, as long as the link would be idle before computation i ends.
  void prefetch_ahead(std::size_t i) {
    while (!list_of(state::absent).empty() && to_device_free_ < now_ + seconds(i)) {
      const auto [next, v] = *list_of(state::absent).begin();
      if (host_ && values_[v].on_host_at > now_ && values_[v].on_host_at >= now_ + seconds(i))
        return;  // not yet complete on the host
      if (memory_.max(i, next) + bytes(v) > budget_ && !(is_due(i, v) && swap_out(i, next, bytes(v)))) return;
      prefetch(v, i);
    }
  }
  /// True if one of the next absent values would be late if the first of them, v, waited any longer.
  bool is_due(std::size_t i, value_id v) {
    double slack = std::numeric_limits<double>::infinity(), transfers = 0;
    int checked = 64;
    for (const auto& [next, x] : list_of(state::absent)) {
      if (checked-- == 0) break;
      transfers += prefetch_seconds(x);
      slack = std::min(slack, ahead_.begins[next] - transfers);
    }
    return slack - ahead_.begins[i] <= seconds(i) + 2 * prefetch_seconds(v);
  }
  /// Makes room at position i for a value that is used at `next`: evicts values on the host that are used after `next`. Their
  /// bytes must also cover the room that is lacking at the positions before `next`, where the walk can evict them later.
  /// @return false if they do not; nothing is evicted then
  bool swap_out(std::size_t i, std::size_t next, bytes_t size) {
    auto& evictable = list_of(state::evictable);
    auto lacking = memory_.max(i, next) + size - budget_;
    for (auto x = evictable.rbegin(); lacking > 0 && x != evictable.rend() && x->first > next; ++x) lacking -= bytes(x->second);
    if (lacking > 0) return false;
    while (memory_.at(i) + size > budget_) evict(evictable.rbegin()->second, i);
    return true;
  }
  /// Offloads values as long as the link would be idle before computation i ends: first those with `departure::first`, then those
  /// whose next use is furthest away. A value moves to `offload_last` if it would be back too late, or if `frugal` and the budget
  /// does not require its copy.
  void offload_ahead(std::size_t i) {
    auto& offloadable = list_of(state::offloadable);
    while (!offloadable.empty() && to_host_free_ < now_ + seconds(i)) {
      const auto v = offloadable.rbegin()->second;
      const auto next = values_[v].next_use;
      const bool too_late = std::max(now_, to_host_free_) + offload_seconds(v) + prefetch_seconds(v) > now_ + longest_pause(v, i);
      if (!must_offload(v) && (too_late || (device_only_memory_ && device_only_memory_->max(i, next) <= budget_)))
        move_to(v, state::offload_last);
      else if ((host_ && !must_offload(v) && !host_->has_room_for(v, now_)) || !offload(v, i, false))
        return;
    }
  }
  /// Puts a source where it starts.
  void place_source(value_id v) {
    auto& x = values_[v];
    x.on_device = !host_ || host_->where.homes[v] == device_tier;
    if (p_.values()[v].starts == any_tier) laid_.schedule.starts.push_back({v, host_->where.homes[v]});
    if (x.on_device) return after_use(v, {x.next_use, x.longest_pause}, 0);
    x.on_host_at = 0;
    if (x.next_use != never) move_to(v, state::absent);
    host_->note_change(v);
  }
  /// Lets sources that may start anywhere start on the device if the device has room for them until their first use.
  void start_on_device() {
    for (auto& [v, tier] : laid_.schedule.starts) {
      auto& x = values_[v];
      const auto readers = p_.consumers(v);
      const auto on_host = [&](operation_id o) { return p_.operations()[o].on != device_tier; };
      if (x.in_list != state::absent || p_.values()[v].held || host_->where.ends[v] != placement::place::nowhere) continue;
      if (std::any_of(readers.begin(), readers.end(), on_host) || start_bytes_ + bytes(v) > budget_) continue;
      if (memory_.max(0, x.next_use) + bytes(v) > budget_) continue;
      tier = device_tier;
      start_bytes_ += bytes(v);
      memory_.add(0, x.next_use, bytes(v));
      if (device_only_memory_) device_only_memory_->add(0, x.next_use, bytes(v));
      host_->unreserve(bytes(v));
      x.on_device = true;
      x.on_host_at = -1;
      after_use(v, {x.next_use, x.longest_pause}, 0);
    }
  }
  /// Runs the operations on the host that are ready, and drops what the host no longer needs. @return false if it has no room
  bool advance_host(std::size_t i) {
    while (const auto o = host_->next_ready())
      if (!run_on_host(*o, i)) return false;
    host_->drop_unneeded(now_);
    return true;
  }
  /// Offloads the inputs of an operation on the host and runs the operation there. @return false if the host has no room
  bool run_on_host(operation_id o, std::size_t i) {
    const auto& op = p_.operations()[o];
    for (auto v : op.inputs)
      if (values_[v].on_host_at < 0 && !offload(v, i, true)) return false;
    for (const auto& x : op.overwrites)
      if (values_[x.input].on_device) evict(x.input, i);
    if (!reserve_on_host(p_.new_bytes(o), i, true)) return false;
    host_->run(o, now_);
    for (auto v : op.outputs) {
      if (values_[v].next_use <= end_) move_to(v, state::absent);
    }
    return true;
  }
  /// Offloads all values that must end on the host. In a cyclic schedule, also drops the values that must not be left over.
  /// @return false if the host has no room
  bool finish() {
    for (value_id v = 0; v < values_.size(); ++v) {
      auto& x = values_[v];
      if (!x.on_device || x.next_use != end_ + 1 || !must_offload(v)) continue;
      if (x.on_host_at < 0 && !offload(v, end_, true)) return false;
    }
    for (value_id v = 0; v < values_.size(); ++v)
      if (host_->cyclic && values_[v].on_device && values_[v].next_use == end_ + 1 && must_offload(v)) drop(v, end_);
    for (auto v : p_.targets())
      if (!host_->cyclic && ends_on_host(v)) host_end_ = std::max(host_end_, values_[v].on_host_at);
    host_->drop_leftovers();
    return true;
  }
  bool ends_on_host(value_id v) const {
    const auto end = host_->where.ends[v];
    return end == placement::place::host || (end == placement::place::anywhere && !values_[v].on_device);
  }
  const problem& p_;
  std::span<const operation_id> order_;
  bytes_t budget_, min_bytes_;
  double max_seconds_;
  std::vector<departure> departures_;
  std::function<bool()> stop_;
  std::size_t end_;
  const copy_link &to_host_link_, &to_device_link_;
  double now_ = 0, to_host_free_ = 0, own_to_device_free_ = 0, host_end_ = 0;
  double& to_device_free_;
  std::vector<state> values_;
  look_ahead ahead_;
  range_peak memory_;  // bytes at each position if no value leaves from now on, and absent values come back at their next use
  bytes_t start_bytes_ = ahead_.start_bytes;
  order_with_copies laid_;
  std::optional<host_state> host_;                // only for problems that are not plain
  std::optional<range_peak> device_only_memory_;  // only if frugal: the part of `memory_` that has no copy on the host
  std::array<by_use, state::none> lists_;
  std::deque<copy> offloads_, prefetches_;  // in flight, first end first
};

}  // namespace detail

}  // namespace remat::copies
