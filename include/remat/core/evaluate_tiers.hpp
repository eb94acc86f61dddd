// SPDX-License-Identifier: Apache-2.0
/// @file
/// The rules of schedules for several tiers. `evaluate` calls `evaluate_tiers`.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluation.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::detail {

/// A table with one cell per value and tier.
template <class T>
class tier_table {
 public:
  explicit tier_table(const problem& p, T first = {}) : tiers_(p.tiers().size()), cells_(p.values().size() * tiers_, first) {}
  T& operator()(value_id v, tier_id t) { return cells_[v * tiers_ + t]; }
  const std::vector<T>& cells() const { return cells_; }

 private:
  std::size_t tiers_;
  std::vector<T> cells_;
};

/// The step with explicit tiers: an offload becomes a copy from the device to the host, a prefetch a copy back.
inline step with_tiers(const problem& p, const step& s) {
  if (s.what == action::offload) return {action::copy, s.which, device_tier, p.host()};
  if (s.what == action::prefetch) return {action::copy, s.which, p.host(), device_tier};
  return s;
}

/// For each link, the number of its stream: the index of the first link on the same stream.
inline std::vector<std::size_t> streams_of(const problem& p) {
  std::vector<std::size_t> streams;
  for (const auto& l : p.links()) {
    const auto same = [&](const copy_link& other) { return other.stream == l.stream; };
    streams.push_back(static_cast<std::size_t>(std::find_if(p.links().begin(), p.links().end(), same) - p.links().begin()));
  }
  return streams;
}

/// Contents of all tiers: follows a schedule without its times, and throws at the first violation of a rule.
class tier_contents {
 public:
  tier_contents(const problem& p, const schedule& s)
      : p_(p), s_(s), homes_(p.values().size(), any_tier), on_(p), live_(p.tiers().size(), 0), has_run_(p.operations().size()) {
    e_.peaks = live_;
  }

  /// @return memory and counts; no times
  /// @throws bad_schedule at the first violation
  evaluation run() {
    start();
    for (; at_ < s_.steps.size(); ++at_) {
      const auto x = with_tiers(p_, s_.steps[at_]);
      step_peak_ = no_bytes;
      if (x.what == action::compute) {
        compute(x.which);
      } else {
        if (x.which >= p_.values().size()) fail("no such value");
        x.what == action::copy ? copy(x.value(), x.from, x.to) : drop(x.value(), x.from);
      }
      e_.memory.push_back(std::max(step_peak_, live_[device_tier]));
    }
    end();
    e_.peak = e_.peaks[device_tier];
    return std::move(e_);
  }

  /// The start tier of each source, after `run`; `any_tier` for the other values.
  const std::vector<tier_id>& homes() const { return homes_; }

 private:
  static constexpr bytes_t no_bytes = -1;

  std::string named(tier_id t) const { return "the " + p_.tiers()[t].name; }
  [[noreturn]] void fail(const std::string& why) const {
    const auto& x = s_.steps[at_];
    throw bad_schedule(
        at_, "step " + std::to_string(at_) + " (" + std::string(to_string(x.what)) + " " + std::to_string(x.which) + "): " + why);
  }
  void require_tier(tier_id t) const {
    if (t >= p_.tiers().size()) fail("no such tier");
  }

  void start() {
    const auto wrong = [](const std::string& why) { throw bad_schedule(0, "starts" + why); };
    for (value_id v = 0; v < homes_.size(); ++v)
      if (p_.is_source(v)) homes_[v] = p_.values()[v].starts;
    for (std::size_t i = 0; i < s_.starts.size(); ++i) {
      const auto [v, t] = s_.starts[i];
      const auto where = "[" + std::to_string(i) + "]: ";
      if (v >= homes_.size()) wrong(where + "no value " + std::to_string(v));
      if (t >= p_.tiers().size()) wrong(where + "no such tier");
      if (!p_.is_source(v) || p_.values()[v].starts != any_tier)
        wrong(where + "value " + std::to_string(v) + " is no source that may start on any tier");
      if (homes_[v] != any_tier) wrong(where + "value " + std::to_string(v) + " starts twice");
      homes_[v] = t;
    }
    for (value_id v = 0; v < homes_.size(); ++v) {
      if (!p_.is_source(v)) continue;
      if (homes_[v] == any_tier)
        wrong(": value " + std::to_string(v) + " may start on any tier, and the schedule does not say on which");
      place(v, homes_[v]);
    }
    for (tier_id t = 0; t < live_.size(); ++t) {
      e_.peaks[t] = live_[t];
      if (const auto why = excess_message(t); !why.empty()) throw bad_schedule(0, "before the first step: " + why);
    }
  }

  void compute(operation_id o) {
    if (o >= p_.operations().size()) fail("no such operation");
    const auto& op = p_.operations()[o];
    if (has_run_[o]) {
      if (op.once) fail("a once-only operation is computed again");
      if (!op.overwrites.empty()) fail("an operation that overwrites its inputs is computed again");
      ++e_.recomputed;
    }
    has_run_[o] = true;
    ++e_.computed;
    for (auto v : op.inputs)
      if (!on_(v, op.on)) fail("input " + std::to_string(v) + " is not on " + named(op.on));
    auto here = live_[op.on] + op.workspace;
    for (auto v : op.outputs) here += p_.values()[v].bytes;
    for (const auto& [output, input] : op.overwrites) {
      here -= p_.values()[output].bytes;
      remove(input, op.on);
    }
    for (auto v : op.outputs) place(v, op.on);
    count(op.on, here);
  }

  void copy(value_id v, tier_id from, tier_id to) {
    if (to == any_tier || from == any_tier) fail("no tier beyond the device is called \"host\"");
    require_tier(from);
    require_tier(to);
    if (!p_.link(from, to)) fail("no link from " + named(from) + " to " + named(to));
    if (!p_.values()[v].movable) fail("the value may not be copied");
    if (!on_(v, from)) fail("the value is not on " + named(from));
    if (on_(v, to)) fail("the value is on " + named(to));
    place(v, to);
    count(to, live_[to]);
  }

  void drop(value_id v, tier_id from) {
    require_tier(from);
    if (!on_(v, from)) fail("the value is not on " + named(from));
    if (p_.values()[v].held && homes_[v] == from) fail("a held value is dropped");
    remove(v, from);
  }

  /// Checks the end: targets are on their final tiers, and a cyclic schedule is back in its initial state.
  void end() {
    const auto wrong = [&](const std::string& why) { throw bad_schedule(s_.steps.size(), why); };
    const auto value = [](value_id v) { return "value " + std::to_string(v); };
    for (auto v : p_.targets()) {
      const auto ends = p_.values()[v].ends;
      if (ends != any_tier && !on_(v, ends)) wrong("target " + std::to_string(v) + " is not on " + named(ends) + " at the end");
      bool somewhere = false;
      for (tier_id t = 0; t < live_.size(); ++t) somewhere = somewhere || on_(v, t);
      if (!somewhere) wrong("target " + std::to_string(v) + " is on no tier at the end");
    }
    if (p_.next().empty()) return;
    auto expected = homes_;  // a carried target ends in the place of its source
    for (const auto& [target, source] : p_.next()) expected[target] = std::exchange(expected[source], any_tier);
    for (value_id v = 0; v < expected.size(); ++v)
      for (tier_id t = 0; t < live_.size(); ++t) {
        const bool leaves = p_.is_target(v) && expected[v] == any_tier && homes_[v] == any_tier;
        if (t == expected[v] && !on_(v, t)) wrong(value(v) + " is not on " + named(t) + " at the end, as the next step begins");
        if (t != expected[v] && on_(v, t) && !leaves) wrong(value(v) + " is left on " + named(t) + " at the end of the step");
      }
  }

  void place(value_id v, tier_id t) {
    if (!on_(v, t)) live_[t] += p_.values()[v].bytes;
    on_(v, t) = 1;
  }
  void remove(value_id v, tier_id t) {
    on_(v, t) = 0;
    live_[t] -= p_.values()[v].bytes;
  }
  void count(tier_id t, bytes_t bytes) {
    if (t == device_tier) step_peak_ = bytes;
    e_.peaks[t] = std::max(e_.peaks[t], bytes);
    if (const auto why = excess_message(t); !why.empty()) fail(why);
  }
  std::string excess_message(tier_id t) const {
    const auto& [name, budget] = p_.tiers()[t];
    if (!budget || e_.peaks[t] <= *budget) return {};
    return named(t) + " needs " + std::to_string(e_.peaks[t]) + " bytes, its budget is " + std::to_string(*budget);
  }

  const problem& p_;
  const schedule& s_;
  evaluation e_;
  std::size_t at_ = 0;
  std::vector<tier_id> homes_;
  tier_table<unsigned char> on_;
  std::vector<bytes_t> live_;
  bytes_t step_peak_ = no_bytes;  // peak on the device within the current step, or `no_bytes`
  std::vector<bool> has_run_;
};

/// Times of a valid schedule. A cyclic schedule is executed again and again.
///
/// - `now`: the clock of the device, which is the end of its last computation or wait.
/// - `ready`, per value and tier: when the value is complete on the tier.
/// - `busy`, per value and tier: end of its last read, by a copy or by a computation that does not run on the device.
/// - `tier_free`, `stream_free`: end of the last computation of another tier, and of the last copy of a stream.
/// - `room_from`, per tier beyond the device: when the room exists that earlier steps of the list have freed. A step that takes
///   room there starts no earlier. So no tier needs more memory than in the order of the list, however late a copy is.
class tier_clocks {
 public:
  tier_clocks(const problem& p, const schedule& s, const std::vector<tier_id>& homes)
      : p_(p),
        s_(s),
        homes_(homes),
        carried_(p.values().size(), false),
        ready_(p, absent),
        busy_(p),
        room_from_(p.tiers().size(), 0),
        tier_free_(room_from_),
        stream_free_(p.links().size(), 0),
        streams_(streams_of(p)) {
    for (value_id v = 0; v < homes.size(); ++v)
      if (homes[v] != any_tier) ready_(v, homes[v]) = 0;
    for (const auto& c : p.next()) carried_[c.target] = true;
  }

  /// Adds the times of one execution to `e`; for a cyclic schedule, of the execution after which the state repeats.
  void run(evaluation& e) {
    if (p_.next().empty()) {
      execute(e);
      e.seconds = now_;
      for (auto v : p_.targets()) e.seconds = std::max(e.seconds, arrival(v));
      return;
    }
    constexpr std::size_t max_executions = 16, averaged = 12;
    std::array<double, max_executions> ends = {};
    auto before = leads();
    for (std::size_t execution = 0; execution < max_executions; ++execution) {
      const double start = now_;
      execute(e);
      carry_over();
      auto after = leads();
      const auto same = [&](double a, double b) { return std::abs(a - b) <= 1e-12 * now_; };
      e.seconds = now_ - start;
      if (std::equal(before.begin(), before.end(), after.begin(), same)) return;
      ends[execution] = now_ + *std::max_element(after.begin(), after.end());
      before = std::move(after);
    }
    e.seconds = (ends[max_executions - 1] - ends[max_executions - 1 - averaged]) / averaged;
  }

 private:
  void execute(evaluation& e) {
    e.copies.clear();
    e.ends.clear();
    start_ = now_;
    for (std::size_t at = 0; at < s_.steps.size(); ++at) {
      const auto x = with_tiers(p_, s_.steps[at]);
      double end = now_;
      if (x.what == action::compute)
        end = compute(p_.operations()[x.which]);
      else if (x.what == action::copy)
        e.copies.push_back(copy(at, x.value(), x.from, x.to));
      else
        end = drop(x.value(), x.from);
      e.ends.push_back(end - start_);
    }
  }

  double compute(const operation& op) {
    const auto t = op.on;
    double begin = t == device_tier ? now_ : std::max({now_, tier_free_[t], room_from_[t]});
    for (auto v : op.inputs) begin = std::max(begin, ready_(v, t));
    for (const auto& o : op.overwrites) begin = std::max(begin, busy_(o.input, t));
    const double end = begin + op.seconds;
    bool frees = op.workspace > 0;
    if (t == device_tier) {
      now_ = end;
    } else {
      tier_free_[t] = end;
      for (auto v : op.inputs) busy_(v, t) = std::max(busy_(v, t), end);
    }
    for (const auto& o : op.overwrites) forget(o.input, t);
    for (auto v : op.outputs) {
      frees = frees || ready_(v, t) != absent;
      ready_(v, t) = end;
    }
    if (t != device_tier && frees)
      room_from_[t] = std::max(room_from_[t], end);  // when the workspace and the replaced outputs are free
    return end;
  }

  evaluation::copy copy(std::size_t at, value_id v, tier_id from, tier_id to) {
    const auto& l = *p_.link(from, to);
    auto& stream = stream_free_[streams_[static_cast<std::size_t>(&l - p_.links().data())]];
    const double begin = std::max({now_, stream, ready_(v, from), to == device_tier ? 0 : room_from_[to]});
    stream = begin + l.latency + static_cast<double>(p_.values()[v].bytes) / l.rate;
    busy_(v, from) = std::max(busy_(v, from), stream);
    ready_(v, to) = stream;
    return {at, begin - start_, stream - start_};
  }

  double drop(value_id v, tier_id t) {
    auto& room = t == device_tier ? now_ : room_from_[t];
    room = std::max({room, busy_(v, t), ready_(v, t)});
    forget(v, t);
    return now_;
  }

  void forget(value_id v, tier_id t) {
    ready_(v, t) = absent;
    busy_(v, t) = 0;
  }

  /// When `v` is complete on its final tier.
  double arrival(value_id v) {
    if (const auto t = p_.values()[v].ends; t != any_tier) return ready_(v, t);
    double first = std::numeric_limits<double>::infinity();
    for (tier_id t = 0; t < room_from_.size(); ++t)
      if (ready_(v, t) != absent) first = std::min(first, ready_(v, t));
    return first;
  }

  /// Ends one execution of a cyclic schedule: carried targets become sources, other targets are dropped unless they are sources.
  void carry_over() {
    for (auto v : p_.targets())
      for (tier_id t = 0; t < room_from_.size(); ++t)
        if (!carried_[v] && homes_[v] == any_tier && ready_(v, t) != absent) drop(v, t);
    for (const auto& [target, source] : p_.next()) {
      const auto t = homes_[source];
      ready_(source, t) = std::exchange(ready_(target, t), absent);
      busy_(source, t) = std::exchange(busy_(target, t), 0);
    }
  }

  /// How far each clock is ahead of `now`, s. Later steps depend on nothing else.
  std::vector<double> leads() const {
    std::vector<double> all;
    for (const auto* clocks : {&ready_.cells(), &busy_.cells(), &room_from_, &tier_free_, &stream_free_})
      for (auto x : *clocks) all.push_back(std::max(x - now_, 0.0));
    return all;
  }

  static constexpr double absent = -1;

  const problem& p_;
  const schedule& s_;
  const std::vector<tier_id>& homes_;
  std::vector<bool> carried_;
  tier_table<double> ready_, busy_;
  std::vector<double> room_from_, tier_free_, stream_free_;
  std::vector<std::size_t> streams_;  // of each link
  double now_ = 0, start_ = 0;
};

/// Executes a schedule of any problem.
///
/// Each tier holds a set of values. A value may be on several tiers; a copy stays valid until it is dropped there.
/// - `compute o`: every input of `o` is on the tier of `o`; afterwards, every output is there. Memory on that tier = bytes on
///   it + bytes of all outputs that overwrite no input + workspace.
/// - `copy v` from `a` to `b`: `v` is movable, is on `a` and not on `b`, and a link runs from `a` to `b`. Its bytes count on `b`
///   from here on.
/// - `drop v`: `v` is on the tier and not held there; its bytes are free afterwards.
/// At the end, each target is on its final tier. If targets become sources of the next step, the schedule is cyclic: it ends in
/// its initial state, with these targets in the place of their sources. Targets that are neither carried nor sources leave.
///
/// `tier_clocks` has the rules for times. A cyclic schedule is executed until its state repeats: every clock is as far ahead of
/// the device's clock as one execution before. The time of that execution is the period. The system is linear over (max, plus),
/// so the state repeats from there on. After 16 executions without repetition, the period is the average delay of the end of all
/// work per execution, over the last 12 executions.
/// @return as `evaluate`; for a cyclic schedule, times and copies are those of the last execution, relative to its beginning
/// @throws bad_schedule as `evaluate`; also for a tier over its budget, or if a cyclic schedule does not end in its initial state
/// Complexity: O(tiers values + edges executed), for a cyclic schedule times the number of executions.
inline evaluation evaluate_tiers(const problem& p, const schedule& s) {
  tier_contents contents(p, s);
  auto e = contents.run();
  tier_clocks(p, s, contents.homes()).run(e);
  return e;
}

}  // namespace remat::detail
