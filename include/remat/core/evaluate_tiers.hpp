// SPDX-License-Identifier: Apache-2.0
/// @file
/// The judge of schedules for several tiers. `evaluate` calls it.
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

/// A cell per value and tier.
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

/// A step with its tiers: those of an offload are the device and the host, those of a prefetch the other way round.
inline step with_tiers(const problem& p, const step& s) {
  if (s.what == action::offload) return {action::copy, s.which, device_tier, p.host()};
  if (s.what == action::prefetch) return {action::copy, s.which, p.host(), device_tier};
  return s;
}

/// Per link: the number of its stream, which is that of the first link of the stream.
inline std::vector<std::size_t> streams_of(const problem& p) {
  std::vector<std::size_t> streams;
  for (const auto& l : p.links()) {
    const auto same = [&](const copy_link& other) { return other.stream == l.stream; };
    streams.push_back(static_cast<std::size_t>(std::find_if(p.links().begin(), p.links().end(), same) - p.links().begin()));
  }
  return streams;
}

/// What is where: follows a schedule without its times, and breaks off at the first rule that it breaks.
class tier_contents {
 public:
  tier_contents(const problem& p, const schedule& s)
      : p_(p), s_(s), homes_(p.values().size(), any_tier), on_(p), live_(p.tiers().size(), 0), has_run_(p.operations().size()) {
    e_.peaks = live_;
  }

  /// @return memory and counts
  evaluation run() {
    start();
    for (; at_ < s_.steps.size(); ++at_) {
      const auto x = with_tiers(p_, s_.steps[at_]);
      device_ = no_bytes;
      if (x.what == action::compute) {
        compute(x.which);
      } else {
        if (x.which >= p_.values().size()) fail("no such value");
        x.what == action::copy ? copy(x.value(), x.from, x.to) : drop(x.value(), x.from);
      }
      e_.memory.push_back(std::max(device_, live_[device_tier]));
    }
    end();
    e_.peak = e_.peaks[device_tier];
    return std::move(e_);
  }

  /// Where each source starts, after `run`; `any_tier` for the other values.
  const std::vector<tier_id>& homes() const { return homes_; }

 private:
  static constexpr bytes_t no_bytes = -1;

  std::string the(tier_id t) const { return "the " + p_.tiers()[t].name; }
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
      put(v, homes_[v]);
    }
    for (tier_id t = 0; t < live_.size(); ++t) {
      e_.peaks[t] = live_[t];
      if (const auto why = over(t); !why.empty()) throw bad_schedule(0, "before the first step: " + why);
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
      if (!on_(v, op.on)) fail("input " + std::to_string(v) + " is not on " + the(op.on));
    auto here = live_[op.on] + op.workspace;
    for (auto v : op.outputs) here += p_.values()[v].bytes;
    for (const auto& [output, input] : op.overwrites) {
      here -= p_.values()[output].bytes;
      take(input, op.on);
    }
    for (auto v : op.outputs) put(v, op.on);
    note(op.on, here);
  }

  void copy(value_id v, tier_id from, tier_id to) {
    if (to == any_tier || from == any_tier) fail("no tier beyond the device is called \"host\"");
    require_tier(from);
    require_tier(to);
    if (!p_.link(from, to)) fail("no link from " + the(from) + " to " + the(to));
    if (!p_.values()[v].movable) fail("the value may not be copied");
    if (!on_(v, from)) fail("the value is not on " + the(from));
    if (on_(v, to)) fail("the value is on " + the(to));
    put(v, to);
    note(to, live_[to]);
  }

  void drop(value_id v, tier_id from) {
    require_tier(from);
    if (!on_(v, from)) fail("the value is not on " + the(from));
    if (p_.values()[v].held && homes_[v] == from) fail("a held value is dropped");
    take(v, from);
  }

  /// Targets where they end, and of cyclic schedules the state in which they began.
  void end() {
    const auto wrong = [&](const std::string& why) { throw bad_schedule(s_.steps.size(), why); };
    const auto value = [](value_id v) { return "value " + std::to_string(v); };
    for (auto v : p_.targets()) {
      const auto ends = p_.values()[v].ends;
      if (ends != any_tier && !on_(v, ends)) wrong("target " + std::to_string(v) + " is not on " + the(ends) + " at the end");
      bool somewhere = false;
      for (tier_id t = 0; t < live_.size(); ++t) somewhere = somewhere || on_(v, t);
      if (!somewhere) wrong("target " + std::to_string(v) + " is on no tier at the end");
    }
    if (p_.next().empty()) return;
    auto expected = homes_;  // of what is to be there: a target that is carried in the place of its source
    for (const auto& [target, source] : p_.next()) expected[target] = std::exchange(expected[source], any_tier);
    for (value_id v = 0; v < expected.size(); ++v)
      for (tier_id t = 0; t < live_.size(); ++t) {
        const bool leaves = p_.is_target(v) && expected[v] == any_tier && homes_[v] == any_tier;
        if (t == expected[v] && !on_(v, t)) wrong(value(v) + " is not on " + the(t) + " at the end, as the next step begins");
        if (t != expected[v] && on_(v, t) && !leaves) wrong(value(v) + " is left on " + the(t) + " at the end of the step");
      }
  }

  void put(value_id v, tier_id t) {
    if (!on_(v, t)) live_[t] += p_.values()[v].bytes;
    on_(v, t) = 1;
  }
  void take(value_id v, tier_id t) {
    on_(v, t) = 0;
    live_[t] -= p_.values()[v].bytes;
  }
  void note(tier_id t, bytes_t bytes) {
    if (t == device_tier) device_ = bytes;
    e_.peaks[t] = std::max(e_.peaks[t], bytes);
    if (const auto why = over(t); !why.empty()) fail(why);
  }
  std::string over(tier_id t) const {
    const auto& [name, budget] = p_.tiers()[t];
    if (!budget || e_.peaks[t] <= *budget) return {};
    return the(t) + " needs " + std::to_string(e_.peaks[t]) + " bytes, its budget is " + std::to_string(*budget);
  }

  const problem& p_;
  const schedule& s_;
  evaluation e_;
  std::size_t at_ = 0;
  std::vector<tier_id> homes_;
  tier_table<unsigned char> on_;
  std::vector<bytes_t> live_;
  bytes_t device_ = no_bytes;  // while the step runs, if it is more than after it
  std::vector<bool> has_run_;
};

/// When it happens: follows a valid schedule, again and again if it is cyclic.
///
/// The device is where time is told: `now` is the end of its last computation or wait. Per value and tier, `ready` is when it is
/// complete there, and `busy` until when something else than the device's computations reads it there. Each stream, and each
/// other tier's computations, follow one another. `floor` is from when on the room exists, on another tier, that steps earlier in
/// the list have freed: nothing that takes room there begins before. So no tier ever needs more than in the order of the list,
/// however late a copy is.
class tier_clocks {
 public:
  tier_clocks(const problem& p, const schedule& s, const std::vector<tier_id>& homes)
      : p_(p),
        s_(s),
        homes_(homes),
        carried_(p.values().size(), false),
        ready_(p, absent),
        busy_(p),
        floor_(p.tiers().size(), 0),
        tier_free_(floor_),
        stream_free_(p.links().size(), 0),
        streams_(streams_of(p)) {
    for (value_id v = 0; v < homes.size(); ++v)
      if (homes[v] != any_tier) ready_(v, homes[v]) = 0;
    for (const auto& c : p.next()) carried_[c.target] = true;
  }

  /// Adds the times of one execution to `e`, or of the last one until the state repeats.
  void run(evaluation& e) {
    if (p_.next().empty()) {
      execute(e);
      e.seconds = now_;
      for (auto v : p_.targets()) e.seconds = std::max(e.seconds, arrival(v));
      return;
    }
    constexpr std::size_t turns = 16, last = 12;
    std::array<double, turns> done = {};
    auto before = ahead();
    for (std::size_t turn = 0; turn < turns; ++turn) {
      const double began = now_;
      execute(e);
      pass_on();
      auto after = ahead();
      const auto same = [&](double a, double b) { return std::abs(a - b) <= 1e-12 * now_; };
      e.seconds = now_ - began;
      if (std::equal(before.begin(), before.end(), after.begin(), same)) return;
      done[turn] = now_ + *std::max_element(after.begin(), after.end());
      before = std::move(after);
    }
    e.seconds = (done[turns - 1] - done[turns - 1 - last]) / last;
  }

 private:
  void execute(evaluation& e) {
    e.copies.clear();
    e.ends.clear();
    began_ = now_;
    for (std::size_t at = 0; at < s_.steps.size(); ++at) {
      const auto x = with_tiers(p_, s_.steps[at]);
      double end = now_;
      if (x.what == action::compute)
        end = compute(p_.operations()[x.which]);
      else if (x.what == action::copy)
        e.copies.push_back(copy(at, x.value(), x.from, x.to));
      else
        end = drop(x.value(), x.from);
      e.ends.push_back(end - began_);
    }
  }

  double compute(const operation& op) {
    const auto t = op.on;
    double begin = t == device_tier ? now_ : std::max({now_, tier_free_[t], floor_[t]});
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
    for (const auto& o : op.overwrites) leave(o.input, t);
    for (auto v : op.outputs) {
      frees = frees || ready_(v, t) != absent;
      ready_(v, t) = end;
    }
    if (t != device_tier && frees) floor_[t] = std::max(floor_[t], end);  // the workspace, and what was there
    return end;
  }

  evaluation::copy copy(std::size_t at, value_id v, tier_id from, tier_id to) {
    const auto& l = *p_.link(from, to);
    auto& stream = stream_free_[streams_[static_cast<std::size_t>(&l - p_.links().data())]];
    const double begin = std::max({now_, stream, ready_(v, from), to == device_tier ? 0 : floor_[to]});
    stream = begin + l.latency + static_cast<double>(p_.values()[v].bytes) / l.rate;
    busy_(v, from) = std::max(busy_(v, from), stream);
    ready_(v, to) = stream;
    return {at, begin - began_, stream - began_};
  }

  double drop(value_id v, tier_id t) {
    auto& room = t == device_tier ? now_ : floor_[t];
    room = std::max({room, busy_(v, t), ready_(v, t)});
    leave(v, t);
    return now_;
  }

  void leave(value_id v, tier_id t) {
    ready_(v, t) = absent;
    busy_(v, t) = 0;
  }

  /// When `v` is where it must end.
  double arrival(value_id v) {
    if (const auto t = p_.values()[v].ends; t != any_tier) return ready_(v, t);
    double first = std::numeric_limits<double>::infinity();
    for (tier_id t = 0; t < floor_.size(); ++t)
      if (ready_(v, t) != absent) first = std::min(first, ready_(v, t));
    return first;
  }

  /// The end of a step of a cyclic schedule: targets are sources from here on, those that are not carried leave as if dropped.
  void pass_on() {
    for (auto v : p_.targets())
      for (tier_id t = 0; t < floor_.size(); ++t)
        if (!carried_[v] && homes_[v] == any_tier && ready_(v, t) != absent) drop(v, t);
    for (const auto& [target, source] : p_.next()) {
      const auto t = homes_[source];
      ready_(source, t) = std::exchange(ready_(target, t), absent);
      busy_(source, t) = std::exchange(busy_(target, t), 0);
    }
  }

  /// How far each clock is ahead of `now`: nothing that began later depends on more.
  std::vector<double> ahead() const {
    std::vector<double> all;
    for (const auto* clocks : {&ready_.cells(), &busy_.cells(), &floor_, &tier_free_, &stream_free_})
      for (auto x : *clocks) all.push_back(std::max(x - now_, 0.0));
    return all;
  }

  static constexpr double absent = -1;

  const problem& p_;
  const schedule& s_;
  const std::vector<tier_id>& homes_;
  std::vector<bool> carried_;
  tier_table<double> ready_, busy_;
  std::vector<double> floor_, tier_free_, stream_free_;
  std::vector<std::size_t> streams_;  // by link
  double now_ = 0, began_ = 0;
};

/// Executes a schedule of any problem.
///
/// For each tier there is a set of values on it; a value may be on several, and a copy stays good until it is dropped there.
/// - `compute o`: every input of `o` is on the tier of `o`, where its outputs are afterwards. Its memory counts there: what is
///   there + bytes of all outputs but those in the place of an input + workspace.
/// - `copy v`: `v` may be copied, is on one tier and not on the other, and there is a link. It counts on the other from here on.
/// - `drop v`: `v` is there, and not held there; its bytes are free afterwards.
/// At the end, each target is where it must end. If there are targets that are sources of the next step, everything is then where
/// it was at first, such targets in the place of their sources; targets that are not carried leave.
///
/// Of the time, `tier_clocks` has the rules. A cyclic schedule is executed until its state repeats, that is, until every clock is
/// as far ahead of the device's as one execution before; the time of that execution is the period. The system is linear over
/// maximum and plus, so this stays. Where that takes more than 16 executions, it is by how much each of the last 12 puts off the
/// end of all work, on average.
/// @return as `evaluate`; of a cyclic schedule, copies and times are those of the last execution, from its begin on
/// @throws bad_schedule as `evaluate`; also for a tier over its budget, and a state at the end that is not that at the beginning
/// Complexity: O(tiers values + edges executed), of cyclic schedules times the number of executions.
inline evaluation evaluate_tiers(const problem& p, const schedule& s) {
  tier_contents contents(p, s);
  auto e = contents.run();
  tier_clocks(p, s, contents.homes()).run(e);
  return e;
}

}  // namespace remat::detail
