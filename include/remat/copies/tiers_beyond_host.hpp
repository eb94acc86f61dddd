// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies between the host and the tiers beyond it: the traffic of the host becomes a problem whose device is the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <remat/copies/order_with_copies.hpp>
#include <remat/copies/placement.hpp>
#include <remat/core/evaluate_tiers.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies::detail {

/// Joins two schedules into one for all tiers. The *front* is for the device and a host that stands for all other tiers. The
/// *back* is for the host and the tiers beyond it; it solves a problem of its own, `beyond()`, whose device is the host.
///
/// In `beyond()`, an operation makes each value that comes to the host, and an operation reads each value that leaves for the
/// device. Operations without inputs and outputs pass the time of the computations on the device.
/// Complexity: O(steps + values + edges of the operations on other tiers).
class tiers_beyond_host {
 public:
  /// @param p     must outlive this
  /// @param order the computations of `front`
  /// @param front a schedule for the device and the host; must outlive this
  tiers_beyond_host(const problem& p, std::span<const operation_id> order, const order_with_copies& front)
      : p_(p),
        chain_(tier_chain(p)),
        front_(front),
        local_tier_(p.tiers().size(), any_tier),
        local_value_(p.values().size(), none),
        arrival_operation_(p.values().size(), none),
        departure_operation_(arrival_operation_),
        on_device_(p.values().size(), false) {
    for (std::size_t i = 1; i < chain_.size(); ++i) local_tier_[chain_[i]] = tier_id(i - 1);
    follow_front(order);
    complete_problem();
  }

  /// The problem of the host and the tiers beyond it. Its operations happen in the order of `order()`.
  const problem& beyond() const { return *beyond_; }
  const std::vector<operation_id>& order() const { return order_; }
  /// Budget of the host, bytes.
  bytes_t budget() const { return p_.capacity(chain_[1]); }

  /// Joins the front with `back`. To be called once.
  /// @param back a schedule of `beyond()` that computes `order()`
  /// @return a schedule of all tiers
  schedule join(const schedule& back) {
    const auto& q = *beyond_;
    for (const auto& [v, t] : front_.schedule.starts)
      if (t == device_tier) joined_.starts.push_back({v, t});
    for (const auto& [v, t] : back.starts) joined_.starts.push_back({original_value_[v], chain_[t + 1]});
    for (value_id v = 0; v < original_value_.size(); ++v)
      if (q.is_source(v) && q.values()[v].starts == device_tier) live_ += bytes(v);
    for (const auto& [v, t] : back.starts)
      if (t == device_tier) live_ += bytes(v);
    auto next_event = events_.begin();
    for (const auto& s : back.steps) {
      const auto x = remat::detail::with_tiers(q, s);
      if (x.what == action::compute) {
        if (q.operations()[x.operation()].on == device_tier)
          replay(*next_event++, x.operation());
        else
          joined_.compute(original_operation_[x.operation()]);
      } else if (x.what == action::copy) {
        if (x.to == device_tier) reserve(bytes(x.value()), {x.value()});
        joined_.copy(original_value_[x.value()], chain_[x.from + 1], chain_[x.to + 1]);
      } else if (x.from == device_tier) {
        pending_drops_.push_back(x.value());
      } else {
        joined_.drop(original_value_[x.value()], chain_[x.from + 1]);
      }
    }
    append_front_until(front_.schedule.steps.size());
    while (!p_.next().empty() && !pending_drops_.empty()) drop(pending_drops_.begin());
    return std::move(joined_);
  }

 private:
  struct event {
    std::size_t step;   // position in the front
    double seconds;     // that pass on the device, s
    double read_until;  // until then its inputs are read, if nothing beyond the host is late, s
  };

  bytes_t bytes(value_id v) const { return values_[v].bytes; }
  bool is_device_step(const step& s) const {
    return s.what == action::drop ? s.from == device_tier
                                  : s.what != action::compute || p_.operations()[s.operation()].on == device_tier;
  }

  /// The value of `beyond()` that stands for `v`. Adds it if it is missing.
  value_id local_value(value_id v) {
    if (local_value_[v] == none) {
      local_value_[v] = values_.size();
      original_value_.push_back(v);
      values_.push_back(p_.values()[v]);
      values_.back().name.clear();
      values_.back().held = false;
      values_.back().starts = values_.back().ends = device_tier;
    }
    return local_value_[v];
  }
  /// Adds an operation to `beyond()` that reads `read` and makes `made`; `none`: no such value.
  operation_id add(value_id read, value_id made, double seconds = 0) {
    operation op;
    if (read != none) op.inputs = {read};
    if (made != none) op.outputs = {made};
    op.seconds = seconds;
    return add(std::move(op), none);
  }
  operation_id add(operation op, operation_id original) {
    operations_.push_back(std::move(op));
    original_operation_.push_back(original);
    return operations_.size() - 1;
  }
  void add_event(operation_id o, std::size_t step, double seconds = 0, double read_until = 0) {
    order_.push_back(o);
    if (operations_[o].on == device_tier) events_.push_back({step, seconds, read_until});
  }
  /// Adds the operations of `beyond()`, by following the front.
  void follow_front(std::span<const operation_id> order) {
    std::vector<double> waits(order.size() + 1, 0);
    for (const auto& w : front_.waits) waits[w.position] += w.seconds;
    for (const auto& x : p_.values()) homes_.push_back(x.starts);
    for (const auto& [v, t] : front_.schedule.starts) homes_[v] = t;
    for (value_id v = 0; v < on_device_.size(); ++v) {
      if (!p_.is_source(v)) continue;
      on_device_[v] = homes_[v] == device_tier;
      if (on_device_[v]) continue;
      auto& x = values_[local_value(v)];
      x.held = p_.values()[v].held;
      x.starts = p_.values()[v].starts == any_tier ? any_tier : local_tier_[homes_[v]];
    }
    std::vector<double> tier_free(chain_.size(), 0);
    double now = 0;
    std::size_t position = 0, next_copy = 0;
    const auto& steps = front_.schedule.steps;
    for (std::size_t k = 0; k < steps.size(); ++k) {
      const auto s = remat::detail::with_tiers(p_, steps[k]);
      if (s.what == action::drop) {
        if (s.from == device_tier) on_device_[s.value()] = false;
        continue;
      }
      if (s.what == action::copy) {
        const auto v = local_value(s.value());
        if (s.from == device_tier) {
          if (arrival_operation_[s.value()] == none) arrival_operation_[s.value()] = add(none, v);
          add_event(arrival_operation_[s.value()], k);
        } else {
          if (departure_operation_[s.value()] == none) departure_operation_[s.value()] = add(v, none);
          add_event(departure_operation_[s.value()], k, 0, front_.to_device[next_copy++].end);
          on_device_[s.value()] = true;
        }
        continue;
      }
      const auto& op = p_.operations()[s.operation()];
      if (op.on == device_tier) {
        auto seconds = op.seconds;
        for (; p_.operations()[order[position]].on != device_tier; ++position) seconds += waits[position];
        seconds += waits[position++];
        now += seconds;
        add_event(add(none, none, seconds), k, seconds);
        for (const auto& x : op.overwrites) on_device_[x.input] = false;
        for (auto v : op.outputs) on_device_[v] = true;
        continue;
      }
      operation local;
      local.workspace = op.workspace, local.once = op.once, local.on = local_tier_[op.on];
      auto& until = tier_free[local.on];
      until = std::max(until, now) + op.seconds;
      if (local.on != device_tier) local.seconds = op.seconds;
      for (auto v : op.inputs) local.inputs.push_back(local_value(v));
      for (auto v : op.outputs) local.outputs.push_back(local_value(v));
      for (const auto& x : op.overwrites) local.overwrites.push_back({local_value(x.output), local_value(x.input)});
      add_event(add(std::move(local), s.operation()), k, 0, until);
    }
  }

  /// Completes `beyond()`: targets, tiers and links.
  void complete_problem() {
    std::vector<value_id> targets;
    std::vector<carry> next;
    std::vector<tier_id> ends(on_device_.size(), device_tier);
    for (auto v : p_.targets()) ends[v] = p_.values()[v].ends;
    for (const auto& c : p_.next())
      if (homes_[c.source] == device_tier)
        ends[c.target] = device_tier;
      else
        next.push_back({local_value(c.target), local_value(c.source)});
    for (auto v : p_.targets()) {
      if (ends[v] == device_tier || (ends[v] == any_tier && on_device_[v])) continue;
      targets.push_back(local_value(v));
      values_[local_value(v)].ends = ends[v] == any_tier ? any_tier : local_tier_[ends[v]];
    }
    if (!p_.next().empty()) {  // `beyond()` must be cyclic, even if it carries no value over
      values_.push_back({});
      values_.push_back({});
      original_value_.insert(original_value_.end(), 2, none);
      const value_id first = values_.size() - 2, last = values_.size() - 1;
      targets.push_back(last);
      next.push_back({last, first});
      add_event(add(none, last), front_.schedule.steps.size());
    }
    memory_system system;
    for (std::size_t i = 1; i < chain_.size(); ++i) system.tiers.push_back(p_.tiers()[chain_[i]]);
    system.tiers.front().budget.reset();
    for (auto l : p_.links()) {
      l.from = local_tier_[l.from], l.to = local_tier_[l.to];
      if (l.from != any_tier && l.to != any_tier) system.links.push_back(std::move(l));
    }
    read_until_.assign(values_.size(), 0);
    beyond_.emplace("", values_, operations_, std::move(targets), std::nullopt, std::nullopt, std::move(system), std::move(next));
  }

  /// Appends the steps of the front before step `end`, without those on other tiers than the device.
  void append_front_until(std::size_t end) {
    for (; front_position_ < end; ++front_position_)
      if (is_device_step(front_.schedule.steps[front_position_])) joined_.steps.push_back(front_.schedule.steps[front_position_]);
  }
  /// Appends the step of the front that `o` stands for, and all steps of the device before it.
  void replay(const event& e, operation_id o) {
    const auto& op = beyond_->operations()[o];
    append_front_until(e.step);
    reserve(beyond_->new_bytes(o), op.outputs);
    live_ -= op.workspace;
    if (front_position_ < front_.schedule.steps.size()) joined_.steps.push_back(front_.schedule.steps[front_position_++]);
    now_ += e.seconds;
    for (auto v : op.inputs) read_until_[v] = std::max(read_until_[v], e.read_until);
    for (auto x = pending_drops_.begin(); x != pending_drops_.end();) x = read_until_[*x] <= now_ ? drop(x) : x + 1;
  }
  /// Makes room for `values` that come to the host. Drops pending values only as far as room is lacking, first those that are
  /// read no more first.
  void reserve(bytes_t more, const std::vector<value_id>& values) {
    for (auto v : values)
      if (const auto x = std::find(pending_drops_.begin(), pending_drops_.end(), v); x != pending_drops_.end()) drop(x);
    const auto read_earlier = [&](value_id a, value_id b) { return read_until_[a] < read_until_[b]; };
    while (live_ + more > budget() && !pending_drops_.empty())
      drop(std::min_element(pending_drops_.begin(), pending_drops_.end(), read_earlier));
    live_ += more;
  }
  std::vector<value_id>::iterator drop(std::vector<value_id>::iterator x) {
    live_ -= bytes(*x);
    if (original_value_[*x] != none) joined_.drop(original_value_[*x], chain_[1]);
    return pending_drops_.erase(x);
  }

  const problem& p_;
  const std::vector<tier_id> chain_;
  const order_with_copies& front_;
  std::vector<tier_id> local_tier_;    // of each tier, in `beyond()`
  std::vector<value_id> local_value_;  // of each value, in `beyond()`
  std::vector<operation_id> arrival_operation_, departure_operation_;
  std::vector<bool> on_device_;
  std::vector<tier_id> homes_;
  std::vector<value> values_;
  std::vector<value_id> original_value_;  // of each value of `beyond()`, in `p`
  std::vector<operation> operations_;
  std::vector<operation_id> original_operation_, order_;
  std::vector<event> events_;  // by position
  std::optional<problem> beyond_;
  schedule joined_;
  std::size_t front_position_ = 0;
  std::vector<value_id> pending_drops_;  // values of `beyond()` on the host that are to be dropped
  std::vector<double> read_until_;       // of each value of `beyond()`: read until then, s
  bytes_t live_ = 0;
  double now_ = 0;
};

}  // namespace remat::copies::detail
