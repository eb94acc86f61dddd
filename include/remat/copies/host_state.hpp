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
/// Complexity: O(edges) over a whole order, and O(readers of the value and their inputs) for each `note_change`; `drop_unneeded`
/// and `reserve` add O(values changed or waiting for their drop) per call.
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
        is_last_tier_(tier_chain(p).size() == 2),
        budget_(is_last_tier_ ? p.tiers()[where.neighbour].budget : std::nullopt),
        drops_unneeded_(is_last_tier_ && (cyclic || budget_)),
        pending_reads_(values.size(), 0),
        read_until_(values.size(), 0),
        waits_(values.size(), false),
        has_run_(p.operations().size(), true) {
    for (auto o : order)
      if (p.operations()[o].on != device_tier) {
        has_run_[o] = false;
        for (auto v : p.operations()[o].inputs) ++pending_reads_[v];
      }
    for (value_id v = 0; v < values.size(); ++v)
      if (p.is_source(v) && where.homes[v] != device_tier) {
        live_ += p.values()[v].bytes;
        if (where.homes[v] == where.neighbour) start_waiting(v, 0);
      }
    if (!is_last_tier_ && p.tiers()[where.neighbour].budget) {
      // 10 % stay free for values that pass through the host on their way to the device.
      max_waiting_ = static_cast<bytes_t>(0.9 * static_cast<double>(p.capacity(where.neighbour)));
      onward_rate_ = p.link(where.neighbour, tier_chain(p)[2])->rate;
    }
  }

  const placement where;
  const bool cyclic;

  bool has_run(operation_id o) const { return has_run_[o]; }
  /// The time from which on the room that was given up on the host can be used, s.
  double room_from() const { return room_from_; }
  /// True if `v` must be copied to the host after its last use on the device.
  bool must_offload(value_id v) const { return where.ends[v] != place::anywhere; }
  /// To be called when `v` came to the host or left the device. Wakes the operations on the host that read `v`, and makes `v` a
  /// candidate for `drop_unneeded`.
  void note_change(value_id v) {
    drop_candidates_.push_back(v);
    for (auto o : p_.consumers(v))
      if (p_.operations()[o].on != device_tier && !has_run_[o]) ready_candidates_.push_back(o);
  }
  /// The next operation on the host that can run now, or nothing.
  std::optional<operation_id> next_ready() {
    while (!ready_candidates_.empty()) {
      const auto o = ready_candidates_.front();
      ready_candidates_.pop_front();
      if (!has_run_[o] && ready(o)) return o;
    }
    return std::nullopt;
  }
  /// A copy or operation reads `v` on the host until `until`, s.
  void note_read(value_id v, double until) { read_until_[v] = std::max(read_until_[v], until); }
  /// Reserves room on the host. If room is lacking, drops copies that are no longer needed and not in use at `now`; if that is
  /// `urgent`, also those that are still in use.
  /// @param now s
  /// @return false if the host has no room
  bool reserve(bytes_t bytes, double now, bool urgent) {
    const auto fits = [&] { return !budget_ || live_ + bytes <= *budget_; };
    if (!fits()) drop_unneeded(now);
    if (!fits() && urgent) drop_unneeded(std::numeric_limits<double>::infinity());
    if (!fits()) return false;
    live_ += bytes;
    return true;
  }
  /// Gives reserved room back.
  void unreserve(bytes_t bytes) { live_ -= bytes; }
  /// True if `v` fits on the host, assuming that values move on to the next tier as fast as the link allows. Always true if the
  /// host has no budget, or if there are no tiers beyond it.
  bool has_room_for(value_id v, double now) {
    move_onward(now);
    return waiting_bytes_ + static_cast<double>(p_.values()[v].bytes) <= static_cast<double>(max_waiting_);
  }
  /// Counts `v` as waiting on the host: it comes to the host, or it leaves the device and has a copy on the host.
  void start_waiting(value_id v, double now) {
    if (waits_[v]) return;
    waits_[v] = true;
    move_onward(now);
    waiting_bytes_ += static_cast<double>(p_.values()[v].bytes);
  }
  /// `v` goes back to the device, and no longer waits on the host.
  void end_waiting(value_id v, double now) {
    if (!waits_[v]) return;
    waits_[v] = false;
    move_onward(now);
    waiting_bytes_ = std::max(0.0, waiting_bytes_ - static_cast<double>(p_.values()[v].bytes));
  }
  /// True if the copy of `v` on the host may be dropped although the device needs `v` again: `v` is also on the device, and
  /// neither an operation on the host nor the end of the schedule needs the copy.
  bool may_drop_copy(value_id v) const {
    const auto& x = values_[v];
    return x.on_host_at >= 0 && x.on_device && x.next_use <= end_ && pending_reads_[v] == 0 && !must_stay(v);
  }
  /// Drops the copy of `v` on the host.
  void drop_copy(value_id v) {
    auto& x = values_[v];
    room_from_ = std::max({room_from_, x.on_host_at, read_until_[v]});
    x.on_host_at = -1;
    unreserve(p_.values()[v].bytes);
    schedule_.drop(v, where.neighbour);
  }

  /// Runs `o` on the host.
  /// @pre the copies of all inputs to the host have been issued, and `new_bytes` of `o` are reserved
  void run(operation_id o, double now) {
    const auto& op = p_.operations()[o];
    unreserve(op.workspace);
    double begin = std::max({now, computes_until_, room_from_});
    for (auto v : op.inputs) begin = std::max(begin, values_[v].on_host_at);
    for (const auto& x : op.overwrites) begin = std::max(begin, read_until_[x.input]);
    computes_until_ = begin + op.seconds;
    if (op.workspace > 0) room_from_ = computes_until_;
    has_run_[o] = true;
    schedule_.compute(o);
    for (auto v : op.inputs) {
      note_read(v, computes_until_);
      --pending_reads_[v];
    }
    for (const auto& x : op.overwrites) values_[x.input].on_host_at = -1;
    for (auto v : op.outputs) values_[v].on_host_at = computes_until_;
    for (auto v : op.inputs) note_change(v);
    for (auto v : op.outputs) note_change(v);
  }
  /// Drops the copies that are no longer needed and not in use at `time`, s.
  void drop_unneeded(double time) {
    if (!drops_unneeded_) return;
    std::size_t remaining = 0;
    for (std::size_t i = 0; i < drop_candidates_.size(); ++i) {
      const auto v = drop_candidates_[i];
      const auto& x = values_[v];
      if (x.on_host_at < 0 || x.on_device || x.next_use <= end_ || pending_reads_[v] > 0 || must_stay(v)) continue;
      if (std::max(x.on_host_at, read_until_[v]) <= time)
        drop_copy(v);
      else
        drop_candidates_[remaining++] = v;
    }
    drop_candidates_.resize(remaining);
  }
  /// At the end of a cyclic schedule: drops all values that must not stay on the host.
  void drop_leftovers() {
    if (!cyclic || !is_last_tier_) return;
    for (value_id v = 0; v < values_.size(); ++v)
      if (values_[v].on_host_at >= 0 && !must_stay(v)) drop_copy(v);
  }

 private:
  void move_onward(double now) {
    waiting_bytes_ = std::max(0.0, waiting_bytes_ - onward_rate_ * (now - waiting_at_));
    waiting_at_ = now;
  }
  bool must_stay(value_id v) const {
    if (p_.is_source(v) && where.homes[v] != device_tier && p_.values()[v].held) return true;
    return where.ends[v] == place::host || where.ends[v] == place::anywhere;
  }
  bool ready(operation_id o) const {
    const auto& op = p_.operations()[o];
    return std::all_of(op.inputs.begin(), op.inputs.end(), [&](value_id v) { return values_[v].on_host_at >= 0; }) &&
           std::all_of(op.overwrites.begin(), op.overwrites.end(), [&](const overwrite& x) {
             const auto& u = values_[x.input];
             return !u.on_device && u.next_use > end_ && pending_reads_[x.input] == 1;
           });
  }

  const problem& p_;
  std::size_t end_;
  std::vector<value_state>& values_;
  schedule& schedule_;
  bool is_last_tier_;  // there are no tiers beyond the host
  std::optional<bytes_t> budget_;
  bool drops_unneeded_;
  std::vector<index_t> pending_reads_;  // per value: operations on the host that are yet to read it
  std::vector<double> read_until_;
  std::vector<bool> waits_;  // per value: counts in `waiting_bytes_`
  double waiting_bytes_ = 0, waiting_at_ = 0,
         onward_rate_ = 0;  // bytes not yet moved on at time `waiting_at_` (s); rate of the link, bytes/s
  bytes_t max_waiting_ = std::numeric_limits<bytes_t>::max();  // limit of `waiting_bytes_`, bytes
  std::vector<bool> has_run_;                                  // per operation; also true if it need not run on the host
  std::deque<operation_id> ready_candidates_;
  std::vector<value_id> drop_candidates_;
  bytes_t live_ = 0;
  double computes_until_ = 0, room_from_ = 0;
};

}  // namespace remat::copies::detail
