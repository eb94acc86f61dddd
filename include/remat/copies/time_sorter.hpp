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
  double room(bytes_t more, double from) const {
    auto held = held_;
    auto then = changes_.empty() ? from : std::max(from, changes_.back().when);
    for (auto x = changes_.rbegin(); x != changes_.rend() && x->when > from; ++x) {
      if (held + more > budget_) return then;
      then = x->when;
      held -= x->bytes;
    }
    return held + more > budget_ ? then : from;
  }
  /// Begins the next step of a cyclic schedule, with `first` bytes.
  /// @return the time of the last change in the step that ends, s
  double again(bytes_t first) {
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
        gone_(p),
        here_(p),
        floor_(p.tiers().size(), 0),
        tier_free_(floor_),
        stream_free_(p.links().size(), 0),
        streams_(remat::detail::streams_of(p)),
        first_(floor_.size(), 0) {
    const auto put = [&](value_id v, tier_id t) {
      if (t == any_tier) return;
      here_(v, t) = 1;
      first_[t] += bytes(v);
    };
    for (value_id v = 0; v < p.values().size(); ++v)
      if (p.is_source(v)) put(v, p.values()[v].starts);
    for (const auto& [v, t] : s.starts) put(v, t);
    live_ = first_[device_tier];
    for (tier_id t = 0; t < floor_.size(); ++t) profiles_.emplace_back(p.capacity(t), first_[t]);
  }

  /// To be called once.
  /// @return a schedule with the same steps, within the same budgets; not always faster. The given schedule if `stop` made it
  ///         give up
  /// Complexity: O(steps log(steps)), and O(changes in flight on a tier) for each step.
  schedule list() {
    const auto here = here_;
    if (!execute()) return s_;
    if (!p_.next().empty()) {  // once more, beginning with the copies in flight at the end
      pass_on(here);
      if (!execute()) return s_;
    }
    std::stable_sort(listed_.begin(), listed_.end(), [](const auto& a, const auto& b) { return a.when < b.when; });
    schedule sorted{{}, s_.starts};
    for (const auto& x : listed_) sorted.steps.push_back(x.what);
    return sorted;
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
      while (!pending_.empty() && pending_.front().when <= now_) leave(pending_.begin());
    }
    while (!pending_.empty()) leave(pending_.begin());
    return true;
  }
  void compute(const step& s) {
    const auto& op = p_.operations()[s.operation()];
    const auto t = op.on;
    const auto more = p_.new_bytes(s.operation());
    if (t == device_tier)
      make_room(more, [&](value_id v) { return std::find(op.outputs.begin(), op.outputs.end(), v) != op.outputs.end(); });
    auto again = op.workspace;
    for (auto v : op.outputs) again += here_(v, t) ? bytes(v) : 0;
    double begin = t == device_tier ? now_ : std::max({now_, tier_free_[t], floor_[t]});
    for (auto v : op.inputs) begin = std::max(begin, ready_(v, t));
    for (const auto& x : op.overwrites) begin = std::max(begin, busy_(x.input, t));
    if (t != device_tier) {
      for (auto v : op.outputs) begin = std::max(begin, gone_(v, t));
      begin = profiles_[t].room(more, begin);
    }
    const double end = begin + op.seconds;
    if (t == device_tier) {
      now_ = end;
      live_ += more - again;
    } else {
      tier_free_[t] = end;
      profiles_[t].change(begin, more);
      profiles_[t].change(end, -again);
      for (auto v : op.inputs) busy_(v, t) = std::max(busy_(v, t), end);
    }
    for (const auto& x : op.overwrites) here_(x.input, t) = 0, busy_(x.input, t) = 0, gone_(x.input, t) = begin;
    for (auto v : op.outputs) here_(v, t) = 1, ready_(v, t) = end;
    listed_.push_back({t == device_tier ? end : begin, s});
  }
  void copy(const step& s, value_id v, tier_id from, tier_id to) {
    const auto& l = *p_.link(from, to);
    auto& stream = stream_free_[streams_[static_cast<std::size_t>(&l - p_.links().data())]];
    if (to == device_tier) make_room(bytes(v), [&](value_id other) { return other == v; });
    double begin = std::max({now_, stream, ready_(v, from)});
    if (to == device_tier) {
      live_ += bytes(v);
    } else {
      begin = profiles_[to].room(bytes(v), std::max({begin, floor_[to], gone_(v, to)}));
      profiles_[to].change(begin, bytes(v));
    }
    stream = begin + l.latency + static_cast<double>(bytes(v)) / l.rate;
    busy_(v, from) = std::max(busy_(v, from), stream);
    ready_(v, to) = stream;
    here_(v, to) = 1;
    listed_.push_back({begin, s});
  }
  void drop(const step& s, value_id v, tier_id t) {
    const double quiet = std::max(busy_(v, t), ready_(v, t));
    busy_(v, t) = 0;
    if (t == device_tier) {
      const auto later = [](double when, const event& x) { return when < x.when; };
      pending_.insert(std::upper_bound(pending_.begin(), pending_.end(), quiet, later), {quiet, s});
      return;
    }
    here_(v, t) = 0;
    gone_(v, t) = quiet;
    profiles_[t].change(quiet, -bytes(v));
    listed_.push_back({quiet, s});
  }
  /// Executes a pending drop on the device. The device waits for it if necessary.
  std::vector<event>::iterator leave(std::vector<event>::iterator x) {
    now_ = std::max(now_, x->when);
    here_(x->what.value(), device_tier) = 0;
    live_ -= bytes(x->what.value());
    listed_.push_back({now_, x->what});
    return pending_.erase(x);
  }
  /// Executes pending drops on the device until `more` bytes fit, and those of values for which `comes` is true.
  template <class Comes>
  void make_room(bytes_t more, const Comes& comes) {
    for (auto x = pending_.begin(); x != pending_.end();) x = comes(x->what.value()) ? leave(x) : x + 1;
    while (live_ + more > budget_ && !pending_.empty()) leave(pending_.begin());
  }
  /// Begins the next step of a cyclic schedule. No value comes to a tier in the next step before the values that are left over
  /// from this step have gone.
  void pass_on(const remat::detail::tier_table<unsigned char>& here) {
    std::vector<bool> carried(p_.values().size(), false);
    for (const auto& c : p_.next()) carried[c.target] = true;
    for (tier_id t = 0; t < floor_.size(); ++t) floor_[t] = std::max(floor_[t], profiles_[t].again(first_[t]));
    for (auto v : p_.targets())
      for (tier_id t = 0; t < floor_.size(); ++t) {
        auto& gone = t == device_tier ? now_ : floor_[t];
        if (!carried[v] && !p_.is_source(v) && here_(v, t)) gone = std::max({gone, ready_(v, t), busy_(v, t)});
      }
    here_ = here;
    for (const auto& [target, source] : p_.next())
      for (tier_id t = 0; t < floor_.size(); ++t)
        if (here_(source, t)) ready_(source, t) = ready_(target, t), busy_(source, t) = busy_(target, t);
    const auto later = [&](double& x) { x = std::max(0.0, x - now_); };
    for (auto* all : {&floor_, &tier_free_, &stream_free_}) std::for_each(all->begin(), all->end(), later);
    for (value_id v = 0; v < p_.values().size(); ++v)
      for (tier_id t = 0; t < floor_.size(); ++t) {
        later(ready_(v, t));
        later(busy_(v, t));
        gone_(v, t) = 0;
      }
    live_ = first_[device_tier];
    listed_.clear();
    now_ = 0;
  }

  const problem& p_;
  const schedule& s_;
  const bytes_t budget_;
  const std::function<bool()> stop_;
  remat::detail::tier_table<double> ready_, busy_, gone_;  // by value and tier, s: complete, read until, dropped
  remat::detail::tier_table<unsigned char> here_;
  std::vector<double> floor_, tier_free_, stream_free_;
  std::vector<std::size_t> streams_;  // by link
  std::vector<bytes_t> first_;        // what each tier holds at the start
  std::vector<tier_profile> profiles_;
  std::vector<event> pending_;  // drops on the device, by the end of the last use
  bytes_t live_ = 0;            // on the device
  double now_ = 0;
  std::vector<event> listed_;
};

}  // namespace remat::copies::detail
