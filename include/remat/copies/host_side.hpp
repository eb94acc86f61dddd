// SPDX-License-Identifier: Apache-2.0
/// @file
/// All tiers but the device while `lay_copies` walks along an order, for problems that are not plain.
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
#include <remat/copies/residence.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies::detail {

/// Operations on the host run as soon as what they read is on its way; copies that nobody needs any more are dropped, if the host
/// has a budget or must look at the end as at first. With tiers beyond the host, it stands for all of them, keeps everything and
/// has room for everything: what becomes of that is for `tier_layer`.
/// Complexity: O(edges + changes log operations) over a whole order; `tidy` and `take` add O(values on the host) per call.
class host_side {
 public:
  using place = residence::place;

  host_side(const problem& p, residence places, std::span<const operation_id> order, std::vector<value_state>& values,
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
      // the rest is for what passes through on its way to the device
      most_ = static_cast<bytes_t>(0.9 * static_cast<double>(p.capacity(where.far)));
      onward_ = p.link(where.far, tier_chain(p)[2])->rate;
    }
  }

  const residence where;
  const bool cyclic;

  bool has_run(operation_id o) const { return has_run_[o]; }
  /// From when on there is room for what comes.
  double room_from() const { return room_from_; }
  /// Must `v` go to the host after its last use on the device?
  bool must_go(value_id v) const { return where.ends[v] != place::anywhere; }
  /// `v` came to the host or left the device.
  void changed(value_id v) {
    spent_.push_back(v);
    for (auto o : p_.consumers(v))
      if (p_.operations()[o].on != device_tier && !has_run_[o]) woken_.push_back(o);
  }
  /// An operation that can run without delay, or nothing.
  std::optional<operation_id> next_ready() {
    while (!woken_.empty()) {
      const auto o = woken_.front();
      woken_.pop_front();
      if (!has_run_[o] && ready(o)) return o;
    }
    return std::nullopt;
  }
  /// Something reads the copy of `v` until then.
  void read(value_id v, double until) { busy_[v] = std::max(busy_[v], until); }
  /// Makes room, by dropping what is not needed, at once if it is `urgent`. @return false if there is none
  bool take(bytes_t bytes, double now, bool urgent) {
    const auto fits = [&] { return !budget_ || live_ + bytes <= *budget_; };
    if (!fits()) tidy(now);
    if (!fits() && urgent) tidy(std::numeric_limits<double>::infinity());
    if (!fits()) return false;
    live_ += bytes;
    return true;
  }
  void give(bytes_t bytes) { live_ -= bytes; }
  /// With tiers beyond: is there room for `v` on the host, if what came there has moved on as fast as its link does that?
  bool has_room_for(value_id v, double now) {
    pass(now);
    return waiting_ + static_cast<double>(p_.values()[v].bytes) <= static_cast<double>(most_);
  }
  /// `v` comes to the host, or leaves the device and has a copy there.
  void hold(value_id v, double now) {
    if (held_[v]) return;
    held_[v] = true;
    pass(now);
    waiting_ += static_cast<double>(p_.values()[v].bytes);
  }
  /// `v` goes back to the device.
  void release(value_id v, double now) {
    if (!held_[v]) return;
    held_[v] = false;
    pass(now);
    waiting_ = std::max(0.0, waiting_ - static_cast<double>(p_.values()[v].bytes));
  }
  /// May its copy go although the device still needs `v`, which is there?
  bool may_give_up(value_id v) const {
    const auto& x = values_[v];
    return x.leaves >= 0 && x.here && x.next <= end_ && reads_[v] == 0 && !stays(v);
  }
  void give_up(value_id v) { drop(v); }

  /// Runs `o`, whose operands are there and which has taken its `new_bytes`.
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
  /// Drops the copies that nobody needs any more, if nothing uses them then.
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
  /// At the end: what stays is left, of cyclic schedules.
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
  bool last_;  // no tiers beyond
  std::optional<bytes_t> budget_;
  bool tidy_;
  std::vector<index_t> reads_;  // by its operations that are yet to run
  std::vector<double> busy_;
  std::vector<bool> held_;                              // on the host, and not on its way back
  double waiting_ = 0, since_ = 0, onward_ = 0;         // bytes on the host that cannot have moved on, s, bytes/s
  bytes_t most_ = std::numeric_limits<bytes_t>::max();  // of them
  std::vector<bool> has_run_;                           // or need not
  std::deque<operation_id> woken_;
  std::vector<value_id> spent_;
  bytes_t live_ = 0;
  double free_ = 0, room_from_ = 0;
};

}  // namespace remat::copies::detail
