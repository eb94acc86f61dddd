// SPDX-License-Identifier: Apache-2.0
/// @file
/// Moves the copies of a schedule to the earliest place in its list at which they can begin and have room.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <remat/copies/order_with_copies.hpp>
#include <remat/copies/time_sorter.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/range_peak.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies {

namespace detail {

/// Moves each copy to the earliest place in the list at which it can begin and its destination has room. Copies on one stream
/// keep their order. To be used once.
/// Complexity: O(steps log(steps)), times the steps that a copy passes.
class early_copies {
 public:
  /// @param s      a valid schedule
  /// @param e      the result of `evaluate` for `s`
  /// @param budget bytes of the device; `s` fits it
  /// @param stop   polled now and then; true gives up
  early_copies(const problem& p, const schedule& s, const evaluation& e, bytes_t budget, std::function<bool()> stop = {})
      : p_(p), s_(s), budget_(budget), stop_(std::move(stop)), arrived_(p), left_(p), ready_(p) {
    list_places(e);
    measure_places();
  }

  /// @return a schedule with the same steps, within the same budgets, that is not slower; `s` if `stop` made it give up
  schedule run() {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if ((i + 1) % copy_options::polled_every == 0 && stop_ && stop_()) return s_;
      const auto x = remat::detail::with_tiers(p_, places_[i].what);
      if (x.what == action::copy)
        move_copy(i, x.value(), x.from, x.to);
      else
        record_computation(i, p_.operations()[x.operation()]);
      for (const auto& d : places_[i].drops) left_(d.value(), d.from) = i + 1;
    }
    return joined();
  }

 private:
  /// A computation or copy, with the steps that stand beside it.
  struct place {
    step what;
    double clock;             // of the device before the step, s
    double end;               // of the step, if it is a computation, s
    std::vector<step> drops;  // after the step
    std::vector<step> copies_before = {};
  };
  struct queue {
    std::size_t place = 0;  // of its last copy
    double free = 0;        // end of its last copy, s
  };

  bytes_t bytes(value_id v) const { return p_.values()[v].bytes; }

  /// Makes a place of each computation and copy; the drops belong to the place before them.
  void list_places(const evaluation& e) {
    double now = 0;
    for (std::size_t k = 0; k < s_.steps.size(); ++k) {
      const auto x = remat::detail::with_tiers(p_, s_.steps[k]);
      if (x.what == action::drop) {
        (places_.empty() ? first_drops_ : places_.back().drops).push_back(s_.steps[k]);
        if (x.from == device_tier) now = e.ends[k];
        continue;
      }
      places_.push_back({s_.steps[k], now, e.ends[k], {}});
      if (x.what == action::compute && p_.operations()[x.operation()].on == device_tier) now = e.ends[k];
    }
  }

  /// Counts the bytes on each tier at each place.
  void measure_places() {
    const auto tiers = p_.tiers().size();
    std::vector<bytes_t> live(tiers, 0);
    std::vector<std::vector<bytes_t>> peaks(tiers);
    remat::detail::tier_table<unsigned char> on(p_);
    const auto add = [&](value_id v, tier_id t) {
      if (!std::exchange(on(v, t), 1)) live[t] += bytes(v);
    };
    const auto remove = [&](value_id v, tier_id t) {
      if (std::exchange(on(v, t), 0)) live[t] -= bytes(v);
    };
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && p_.values()[v].starts != any_tier) add(v, p_.values()[v].starts);
    for (const auto& [v, t] : s_.starts) add(v, t);
    for (const auto& d : first_drops_) remove(d.value(), d.from);
    for (const auto& at : places_) {
      const auto x = remat::detail::with_tiers(p_, at.what);
      auto peak = live;
      if (x.what == action::copy) {
        add(x.value(), x.to);
        peak = live;
      } else {
        const auto& op = p_.operations()[x.operation()];
        peak[op.on] += p_.new_bytes(x.operation());
        for (const auto& o : op.overwrites) remove(o.input, op.on);
        for (auto v : op.outputs) add(v, op.on);
      }
      for (tier_id t = 0; t < tiers; ++t) peaks[t].push_back(peak[t]);
      for (const auto& d : at.drops) remove(d.value(), d.from);
    }
    for (const auto& bytes_at : peaks) memory_.emplace_back(bytes_at);
  }

  /// Moves the copy at place `i` to the earliest possible place.
  void move_copy(std::size_t i, value_id v, tier_id from, tier_id to) {
    const auto& link = *p_.link(from, to);
    auto& stream = queues_[link.stream];
    const double possible = std::max(stream.free, ready_(v, from));
    const auto earliest = std::max({stream.place, arrived_(v, from), left_(v, to)});
    const auto limit = to == device_tier ? budget_ : p_.capacity(to);
    auto target = i;
    while (target > earliest && places_[target].clock > possible && memory_[to].at(target - 1) + bytes(v) <= limit) --target;
    memory_[to].add(target, i, bytes(v));
    places_[target].copies_before.push_back(places_[i].what);
    stream = {target, std::max(possible, places_[target].clock) + link.latency + static_cast<double>(bytes(v)) / link.rate};
    ready_(v, to) = stream.free;
    arrived_(v, to) = target;
  }

  void record_computation(std::size_t i, const operation& op) {
    for (const auto& o : op.overwrites) left_(o.input, op.on) = i + 1;
    for (auto v : op.outputs) {
      arrived_(v, op.on) = i + 1;
      ready_(v, op.on) = places_[i].end;
    }
  }

  /// The steps of all places, with the copies where they have been moved.
  schedule joined() {
    schedule early{std::move(first_drops_), s_.starts};
    for (const auto& x : places_) {
      early.steps.insert(early.steps.end(), x.copies_before.begin(), x.copies_before.end());
      if (x.what.what == action::compute) early.steps.push_back(x.what);
      early.steps.insert(early.steps.end(), x.drops.begin(), x.drops.end());
    }
    return early;
  }

  const problem& p_;
  const schedule& s_;
  bytes_t budget_;
  std::function<bool()> stop_;
  std::vector<place> places_;
  std::vector<step> first_drops_;                          // before the first place
  std::vector<range_peak> memory_;                         // per tier: bytes at each place
  remat::detail::tier_table<std::size_t> arrived_, left_;  // by value and tier: first place after it came, or left
  remat::detail::tier_table<double> ready_;                // by value and tier: when it is complete, s
  std::unordered_map<std::string, queue> queues_;          // by stream
};

}  // namespace detail

/// Makes a schedule faster: repeats `early_copies` and `time_sorter` as long as that shortens the time.
/// @param s      a valid schedule of a problem that is not plain; replaced by a faster schedule
/// @param e      the result of `evaluate` for `s`
/// @param budget bytes of the device; `s` fits it
/// @param stop   polled now and then; true gives up
/// @return the time of `s`, s
/// Complexity: that of `evaluate`, `early_copies` and `time_sorter`, once more than the schedule gets faster.
inline double tighten(const problem& p, schedule& s, evaluation e, bytes_t budget, const std::function<bool()>& stop = {}) {
  for (;;) {
    auto other = detail::early_copies(p, s, e, budget, stop).run();
    other = detail::time_sorter(p, other, budget, stop).sorted();
    if (s.steps.size() >= copy_options::polled_every && stop && stop()) return e.seconds;
    auto measured = evaluate(p, other);
    if (!(measured.seconds < e.seconds * (1 - 1e-4))) return e.seconds;
    s = std::move(other);
    e = std::move(measured);
  }
}

}  // namespace remat::copies
