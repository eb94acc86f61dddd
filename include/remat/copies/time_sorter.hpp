// SPDX-License-Identifier: Apache-2.0
/// @file
/// Sorts the steps of a schedule on several tiers by the times at which they happen. Drops are placed where they delay least.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include <remat/copies/order_with_copies.hpp>
#include <remat/core/evaluate_tiers.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies::detail {

/// The bytes on a tier other than the device over time, while a list of steps is executed.
class tier_profile {
 public:
  tier_profile(bytes_t budget, bytes_t first) : budget_(budget), held_(first) {}
  /// Adds `bytes`, which may be negative, from the time `when` on, s. Complexity: O(changes after `when`).
  void change(double when, bytes_t bytes) {
    auto at = changes_.end();
    while (at != changes_.begin() && (at - 1)->when > when) --at;
    changes_.insert(at, {when, bytes});
    held_ += bytes;
  }
  /// The earliest time from which on `more` bytes fit, s; `from` at the earliest.
  /// Complexity: O(changes after `from`).
  double earliest_fit(bytes_t more, double from) const {
    auto held = held_;
    auto time = changes_.empty() ? from : std::max(from, changes_.back().when);
    for (auto x = changes_.rbegin(); x != changes_.rend() && x->when > from; ++x) {
      if (held + more > budget_) return time;
      time = x->when;
      held -= x->bytes;
    }
    return held + more > budget_ ? time : from;
  }
  /// Begins the next step of a cyclic schedule, with `first` bytes.
  /// @return the time of the last change in the step that ends, s
  double restart(bytes_t first) {
    const double last = changes_.empty() ? 0 : changes_.back().when;
    changes_.clear();
    held_ = first;
    return last;
  }

 private:
  struct event {
    double when;
    bytes_t bytes;
  };
  bytes_t budget_, held_;  // after all changes
  std::vector<event> changes_;
};

/// Executes a schedule and sorts its steps by time:
/// - a computation on the device by its end; a copy, or an operation on another tier, by its begin;
/// - a drop by the end of the last copy or operation that uses the value on this tier.
///
/// If memory on the device is short, the device waits for drops, first for the value that is free first. Copies to a tier claim
/// room in the order of the given schedule. A later copy may still use room that an earlier copy does not need yet.
///
/// In the sorted list, a tier never holds more than during the execution. A copy that is issued early and begins late takes no
/// room before its begin. No copy waits for a drop that need not come before it.
class time_sorter {
 public:
  /// @param s      a valid schedule of a problem that is not plain; must outlive this
  /// @param budget bytes of the device; `s` fits it
  /// @param stop   polled now and then; true gives up
  time_sorter(const problem& p, const schedule& s, bytes_t budget, std::function<bool()> stop = {})
      : p_(p),
        s_(s),
        budget_(budget),
        stop_(std::move(stop)),
        ready_(p),
        busy_(p),
        dropped_at_(p),
        present_(p),
        room_from_(p.tiers().size(), 0),
        tier_free_(room_from_),
        stream_free_(p.links().size(), 0),
        streams_(remat::detail::streams_of(p)),
        start_bytes_(room_from_.size(), 0) {
    const auto put = [&](value_id v, tier_id t) {
      if (t == any_tier) return;
      present_(v, t) = 1;
      start_bytes_[t] += bytes(v);
    };
    for (value_id v = 0; v < p.values().size(); ++v)
      if (p.is_source(v)) put(v, p.values()[v].starts);
    for (const auto& [v, t] : s.starts) put(v, t);
    live_ = start_bytes_[device_tier];
    for (tier_id t = 0; t < room_from_.size(); ++t) profiles_.emplace_back(p.capacity(t), start_bytes_[t]);
  }

  /// To be called once.
  /// @return a schedule with the same steps, within the same budgets; not always faster. The given schedule if `stop` made it
  ///         give up
  /// Complexity: O(steps log(steps)), and O(changes in flight on a tier) for each step.
  schedule sorted() {
    const auto present = present_;
    if (!execute()) return s_;
    if (!p_.next().empty()) {  // once more, beginning with the copies in flight at the end
      carry_over(present);
      if (!execute()) return s_;
    }
    std::stable_sort(timed_steps_.begin(), timed_steps_.end(), [](const auto& a, const auto& b) { return a.when < b.when; });
    schedule result{{}, s_.starts};
    for (const auto& x : timed_steps_) result.steps.push_back(x.what);
    return result;
  }

 private:
  struct event {
    double when;
    step what;
  };

  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }

  /// @return false if `stop` made it give up
  bool execute() {
    std::size_t steps = 0;
    for (const auto& s : s_.steps) {
      if (++steps % copy_options::polled_every == 0 && stop_ && stop_()) return false;
      const auto x = remat::detail::with_tiers(p_, s);
      if (x.what == action::compute)
        compute(s);
      else if (x.what == action::copy)
        copy(s, x.value(), x.from, x.to);
      else
        drop(s, x.value(), x.from);
      while (!pending_drops_.empty() && pending_drops_.front().when <= now_) execute_drop(pending_drops_.begin());
    }
    while (!pending_drops_.empty()) execute_drop(pending_drops_.begin());
    return true;
  }
  void compute(const step& s) {
    const auto& op = p_.operations()[s.operation()];
    const auto t = op.on;
    const auto more = p_.new_bytes(s.operation());
    if (t == device_tier)
      make_room(more, [&](value_id v) { return std::find(op.outputs.begin(), op.outputs.end(), v) != op.outputs.end(); });
    auto freed = op.workspace;
    for (auto v : op.outputs) freed += present_(v, t) ? bytes(v) : 0;
    double begin = t == device_tier ? now_ : std::max({now_, tier_free_[t], room_from_[t]});
    for (auto v : op.inputs) begin = std::max(begin, ready_(v, t));
    for (const auto& x : op.overwrites) begin = std::max(begin, busy_(x.input, t));
    if (t != device_tier) {
      for (auto v : op.outputs) begin = std::max(begin, dropped_at_(v, t));
      begin = profiles_[t].earliest_fit(more, begin);
    }
    const double end = begin + op.seconds;
    if (t == device_tier) {
      now_ = end;
      live_ += more - freed;
    } else {
      tier_free_[t] = end;
      profiles_[t].change(begin, more);
      profiles_[t].change(end, -freed);
      for (auto v : op.inputs) busy_(v, t) = std::max(busy_(v, t), end);
    }
    for (const auto& x : op.overwrites) present_(x.input, t) = 0, busy_(x.input, t) = 0, dropped_at_(x.input, t) = begin;
    for (auto v : op.outputs) present_(v, t) = 1, ready_(v, t) = end;
    timed_steps_.push_back({t == device_tier ? end : begin, s});
  }
  void copy(const step& s, value_id v, tier_id from, tier_id to) {
    const auto& l = *p_.link(from, to);
    auto& stream = stream_free_[streams_[static_cast<std::size_t>(&l - p_.links().data())]];
    if (to == device_tier) make_room(bytes(v), [&](value_id other) { return other == v; });
    double begin = std::max({now_, stream, ready_(v, from)});
    if (to == device_tier) {
      live_ += bytes(v);
    } else {
      begin = profiles_[to].earliest_fit(bytes(v), std::max({begin, room_from_[to], dropped_at_(v, to)}));
      profiles_[to].change(begin, bytes(v));
    }
    stream = begin + l.latency + static_cast<double>(bytes(v)) / l.rate;
    busy_(v, from) = std::max(busy_(v, from), stream);
    ready_(v, to) = stream;
    present_(v, to) = 1;
    timed_steps_.push_back({begin, s});
  }
  void drop(const step& s, value_id v, tier_id t) {
    const double last_use_end = std::max(busy_(v, t), ready_(v, t));
    busy_(v, t) = 0;
    if (t == device_tier) {
      const auto later = [](double when, const event& x) { return when < x.when; };
      pending_drops_.insert(std::upper_bound(pending_drops_.begin(), pending_drops_.end(), last_use_end, later),
                            {last_use_end, s});
      return;
    }
    present_(v, t) = 0;
    dropped_at_(v, t) = last_use_end;
    profiles_[t].change(last_use_end, -bytes(v));
    timed_steps_.push_back({last_use_end, s});
  }
  /// Executes a pending drop on the device. The device waits for it if necessary.
  std::vector<event>::iterator execute_drop(std::vector<event>::iterator x) {
    now_ = std::max(now_, x->when);
    present_(x->what.value(), device_tier) = 0;
    live_ -= bytes(x->what.value());
    timed_steps_.push_back({now_, x->what});
    return pending_drops_.erase(x);
  }
  /// Executes pending drops on the device until `more` bytes fit, and those of values for which `comes` is true.
  template <class Comes>
  void make_room(bytes_t more, const Comes& comes) {
    for (auto x = pending_drops_.begin(); x != pending_drops_.end();) x = comes(x->what.value()) ? execute_drop(x) : x + 1;
    while (live_ + more > budget_ && !pending_drops_.empty()) execute_drop(pending_drops_.begin());
  }
  /// Begins the next step of a cyclic schedule. No value comes to a tier in the next step before the values that are left over
  /// from this step have gone.
  void carry_over(const remat::detail::tier_table<unsigned char>& present) {
    std::vector<bool> carried(p_.values().size(), false);
    for (const auto& c : p_.next()) carried[c.target] = true;
    for (tier_id t = 0; t < room_from_.size(); ++t)
      room_from_[t] = std::max(room_from_[t], profiles_[t].restart(start_bytes_[t]));
    for (auto v : p_.targets())
      for (tier_id t = 0; t < room_from_.size(); ++t) {
        auto& free_from = t == device_tier ? now_ : room_from_[t];
        if (!carried[v] && !p_.is_source(v) && present_(v, t)) free_from = std::max({free_from, ready_(v, t), busy_(v, t)});
      }
    present_ = present;
    for (const auto& [target, source] : p_.next())
      for (tier_id t = 0; t < room_from_.size(); ++t)
        if (present_(source, t)) ready_(source, t) = ready_(target, t), busy_(source, t) = busy_(target, t);
    const auto later = [&](double& x) { x = std::max(0.0, x - now_); };
    for (auto* all : {&room_from_, &tier_free_, &stream_free_}) std::for_each(all->begin(), all->end(), later);
    for (value_id v = 0; v < p_.values().size(); ++v)
      for (tier_id t = 0; t < room_from_.size(); ++t) {
        later(ready_(v, t));
        later(busy_(v, t));
        dropped_at_(v, t) = 0;
      }
    live_ = start_bytes_[device_tier];
    timed_steps_.clear();
    now_ = 0;
  }

  const problem& p_;
  const schedule& s_;
  const bytes_t budget_;
  const std::function<bool()> stop_;
  remat::detail::tier_table<double> ready_, busy_, dropped_at_;  // by value and tier, s: complete, read until, dropped
  remat::detail::tier_table<unsigned char> present_;
  std::vector<double> room_from_, tier_free_, stream_free_;
  std::vector<std::size_t> streams_;  // by link
  std::vector<bytes_t> start_bytes_;  // what each tier holds at the start
  std::vector<tier_profile> profiles_;
  std::vector<event> pending_drops_;  // drops on the device, by the end of the last use
  bytes_t live_ = 0;                  // on the device
  double now_ = 0;
  std::vector<event> timed_steps_;
};

}  // namespace remat::copies::detail
