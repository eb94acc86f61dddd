// SPDX-License-Identifier: Apache-2.0
/// @file
/// State of the host while `schedule_copies` walks along an order, for problems that are not plain.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <remat/copies/look_ahead.hpp>
#include <remat/copies/placement.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies::detail {

/// The host during the walk (`copy_walk`): its operations, its copies of values, and its free memory. An operation on the
/// host starts once the copies of its inputs to the host have been issued. If the host has a budget or the problem is cyclic, the
/// host drops copies that are no longer needed.
///
/// If there are tiers beyond the host, the host stands for all of them. It then has room for everything and drops nothing;
/// `tiers_beyond_host` plans what these tiers hold.
/// Complexity: O(edges) over a whole order, and O(readers of the value and their inputs) for each `changed`; `tidy` and `take`
/// add O(values changed or waiting for their drop) per call.
class host_state {
 public:
  using place = placement::place;

  host_state(const problem& p, placement places, std::span<const operation_id> order, std::vector<value_state>& values,
             schedule& s)
      : where(std::move(places)),
        cyclic(!p.next().empty()),
        p_(p),
        end_(order.size()),
        values_(values),
        schedule_(s),
        last_(tier_chain(p).size() == 2),
        budget_(last_ ? p.tiers()[where.far].budget : std::nullopt),
        tidy_(last_ && (cyclic || budget_)),
        reads_(values.size(), 0),
        busy_(values.size(), 0),
        held_(values.size(), false),
        has_run_(p.operations().size(), true) {
    for (auto o : order)
      if (p.operations()[o].on != device_tier) {
        has_run_[o] = false;
        for (auto v : p.operations()[o].inputs) ++reads_[v];
      }
    for (value_id v = 0; v < values.size(); ++v)
      if (p.is_source(v) && where.homes[v] != device_tier) {
        live_ += p.values()[v].bytes;
        if (where.homes[v] == where.far) hold(v, 0);
      }
    if (!last_ && p.tiers()[where.far].budget) {
      // 10 % stay free for values that pass through the host on their way to the device.
      most_ = static_cast<bytes_t>(0.9 * static_cast<double>(p.capacity(where.far)));
      onward_ = p.link(where.far, tier_chain(p)[2])->rate;
    }
  }

  const placement where;
  const bool cyclic;

  bool has_run(operation_id o) const { return has_run_[o]; }
  /// The time from which on the room that was given up on the host can be used, s.
  double room_from() const { return room_from_; }
  /// True if `v` must be copied to the host after its last use on the device.
  bool must_go(value_id v) const { return where.ends[v] != place::anywhere; }
  /// To be called when `v` came to the host or left the device. Wakes the operations on the host that read `v`, and makes `v` a
  /// candidate for `tidy`.
  void changed(value_id v) {
    spent_.push_back(v);
    for (auto o : p_.consumers(v))
      if (p_.operations()[o].on != device_tier && !has_run_[o]) woken_.push_back(o);
  }
  /// The next operation on the host that can run now, or nothing.
  std::optional<operation_id> next_ready() {
    while (!woken_.empty()) {
      const auto o = woken_.front();
      woken_.pop_front();
      if (!has_run_[o] && ready(o)) return o;
    }
    return std::nullopt;
  }
  /// A copy or operation reads `v` on the host until `until`, s.
  void read(value_id v, double until) { busy_[v] = std::max(busy_[v], until); }
  /// Reserves room on the host. If room is lacking, drops copies that are no longer needed and not in use at `now`; if that is
  /// `urgent`, also those that are still in use.
  /// @param now s
  /// @return false if the host has no room
  bool take(bytes_t bytes, double now, bool urgent) {
    const auto fits = [&] { return !budget_ || live_ + bytes <= *budget_; };
    if (!fits()) tidy(now);
    if (!fits() && urgent) tidy(std::numeric_limits<double>::infinity());
    if (!fits()) return false;
    live_ += bytes;
    return true;
  }
  /// Gives reserved room back.
  void give(bytes_t bytes) { live_ -= bytes; }
  /// True if `v` fits on the host, assuming that values move on to the next tier as fast as the link allows. Always true if the
  /// host has no budget, or if there are no tiers beyond it.
  bool has_room_for(value_id v, double now) {
    pass(now);
    return waiting_ + static_cast<double>(p_.values()[v].bytes) <= static_cast<double>(most_);
  }
  /// Counts `v` as waiting on the host: it comes to the host, or it leaves the device and has a copy on the host.
  void hold(value_id v, double now) {
    if (held_[v]) return;
    held_[v] = true;
    pass(now);
    waiting_ += static_cast<double>(p_.values()[v].bytes);
  }
  /// `v` goes back to the device, and no longer waits on the host.
  void release(value_id v, double now) {
    if (!held_[v]) return;
    held_[v] = false;
    pass(now);
    waiting_ = std::max(0.0, waiting_ - static_cast<double>(p_.values()[v].bytes));
  }
  /// True if the copy of `v` on the host may be dropped although the device needs `v` again: `v` is also on the device, and
  /// neither an operation on the host nor the end of the schedule needs the copy.
  bool may_give_up(value_id v) const {
    const auto& x = values_[v];
    return x.leaves >= 0 && x.here && x.next <= end_ && reads_[v] == 0 && !stays(v);
  }
  /// Drops the copy of `v` on the host.
  void give_up(value_id v) { drop(v); }

  /// Runs `o` on the host.
  /// @pre the copies of all inputs to the host have been issued, and `new_bytes` of `o` are reserved
  void run(operation_id o, double now) {
    const auto& op = p_.operations()[o];
    give(op.workspace);
    double begin = std::max({now, free_, room_from_});
    for (auto v : op.inputs) begin = std::max(begin, values_[v].leaves);
    for (const auto& x : op.overwrites) begin = std::max(begin, busy_[x.input]);
    free_ = begin + op.seconds;
    if (op.workspace > 0) room_from_ = free_;
    has_run_[o] = true;
    schedule_.compute(o);
    for (auto v : op.inputs) {
      read(v, free_);
      --reads_[v];
    }
    for (const auto& x : op.overwrites) values_[x.input].leaves = -1;
    for (auto v : op.outputs) values_[v].leaves = free_;
    for (auto v : op.inputs) changed(v);
    for (auto v : op.outputs) changed(v);
  }
  /// Drops the copies that are no longer needed and not in use at time `then`.
  void tidy(double then) {
    if (!tidy_) return;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < spent_.size(); ++i) {
      const auto v = spent_[i];
      const auto& x = values_[v];
      if (x.leaves < 0 || x.here || x.next <= end_ || reads_[v] > 0 || stays(v)) continue;
      if (std::max(x.leaves, busy_[v]) <= then)
        drop(v);
      else
        spent_[kept++] = v;
    }
    spent_.resize(kept);
  }
  /// At the end of a cyclic schedule: drops all values that must not stay on the host.
  void clear() {
    if (!cyclic || !last_) return;
    for (value_id v = 0; v < values_.size(); ++v)
      if (values_[v].leaves >= 0 && !stays(v)) drop(v);
  }

 private:
  void pass(double now) {
    waiting_ = std::max(0.0, waiting_ - onward_ * (now - since_));
    since_ = now;
  }
  bool stays(value_id v) const {
    if (p_.is_source(v) && where.homes[v] != device_tier && p_.values()[v].held) return true;
    return where.ends[v] == place::host || where.ends[v] == place::anywhere;
  }
  void drop(value_id v) {
    auto& x = values_[v];
    room_from_ = std::max({room_from_, x.leaves, busy_[v]});
    x.leaves = -1;
    give(p_.values()[v].bytes);
    schedule_.drop(v, where.far);
  }
  bool ready(operation_id o) const {
    const auto& op = p_.operations()[o];
    return std::all_of(op.inputs.begin(), op.inputs.end(), [&](value_id v) { return values_[v].leaves >= 0; }) &&
           std::all_of(op.overwrites.begin(), op.overwrites.end(), [&](const overwrite& x) {
             const auto& u = values_[x.input];
             return !u.here && u.next > end_ && reads_[x.input] == 1;
           });
  }

  const problem& p_;
  std::size_t end_;
  std::vector<value_state>& values_;
  schedule& schedule_;
  bool last_;  // there are no tiers beyond the host
  std::optional<bytes_t> budget_;
  bool tidy_;
  std::vector<index_t> reads_;  // per value: operations on the host that are yet to read it
  std::vector<double> busy_;
  std::vector<bool> held_;                              // per value: counts in `waiting_`
  double waiting_ = 0, since_ = 0, onward_ = 0;         // bytes not yet moved on at time `since_` (s); rate of the link, bytes/s
  bytes_t most_ = std::numeric_limits<bytes_t>::max();  // limit of `waiting_`, bytes
  std::vector<bool> has_run_;                           // per operation; also true if it need not run on the host
  std::deque<operation_id> woken_;
  std::vector<value_id> spent_;
  bytes_t live_ = 0;
  double free_ = 0, room_from_ = 0;
};

}  // namespace remat::copies::detail
