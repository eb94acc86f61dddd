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
/// keep their order.
/// @param s      a valid schedule
/// @param e      the result of `evaluate` for `s`
/// @param budget bytes of the device; `s` fits it
/// @param stop   polled now and then; true gives up
/// @return a schedule with the same steps, within the same budgets, that is not slower; `s` if `stop` made it give up
/// Complexity: O(steps log(steps)), times the steps that a copy passes.
inline schedule with_early_copies(const problem& p, const schedule& s, const evaluation& e, bytes_t budget,
                                  const std::function<bool()>& stop = {}) {
  struct place {
    step what;
    double clock;            // of the device before the step, s
    double end;              // of the step, if it is a computation, s
    std::vector<step> then;  // drops after the step
    std::vector<step> before = {};
  };
  const auto tiers = p.tiers().size();
  const auto size = [&](value_id v) { return p.values()[v].bytes; };
  remat::detail::tier_table<std::size_t> put(p), left(p);  // by value and tier: first place after it came, or after it left
  std::vector<place> list;
  std::vector<step> first;
  double now = 0;
  for (std::size_t k = 0; k < s.steps.size(); ++k) {
    const auto x = remat::detail::with_tiers(p, s.steps[k]);
    if (x.what == action::drop) {
      (list.empty() ? first : list.back().then).push_back(s.steps[k]);
      if (x.from == device_tier) now = e.ends[k];
      continue;
    }
    list.push_back({s.steps[k], now, e.ends[k], {}});
    if (x.what == action::compute && p.operations()[x.operation()].on == device_tier) now = e.ends[k];
  }

  // Bytes on each tier at each place.
  std::vector<bytes_t> live(tiers, 0);
  std::vector<std::vector<bytes_t>> holds(tiers);
  remat::detail::tier_table<unsigned char> on(p);
  const auto come = [&](value_id v, tier_id t) {
    if (!std::exchange(on(v, t), 1)) live[t] += size(v);
  };
  const auto go = [&](value_id v, tier_id t) {
    if (std::exchange(on(v, t), 0)) live[t] -= size(v);
  };
  for (value_id v = 0; v < p.values().size(); ++v)
    if (p.is_source(v) && p.values()[v].starts != any_tier) come(v, p.values()[v].starts);
  for (const auto& [v, t] : s.starts) come(v, t);
  for (const auto& x : first) go(x.value(), x.from);
  for (const auto& at : list) {
    const auto x = remat::detail::with_tiers(p, at.what);
    auto peak = live;
    if (x.what == action::copy) {
      come(x.value(), x.to);
      peak = live;
    } else {
      const auto& op = p.operations()[x.operation()];
      peak[op.on] += p.new_bytes(x.operation());
      for (const auto& o : op.overwrites) go(o.input, op.on);
      for (auto v : op.outputs) come(v, op.on);
    }
    for (tier_id t = 0; t < tiers; ++t) holds[t].push_back(peak[t]);
    for (const auto& d : at.then) go(d.value(), d.from);
  }
  std::vector<range_peak> memory(holds.begin(), holds.end());

  // Move the copies, one after the other.
  struct queue {
    std::size_t place = 0;  // of its last copy
    double free = 0;
  };
  std::unordered_map<std::string, queue> queues;
  remat::detail::tier_table<double> ready(p);
  for (std::size_t i = 0; i < list.size(); ++i) {
    const auto x = remat::detail::with_tiers(p, list[i].what);
    const auto at = i + 1;
    if (at % copy_options::polled_every == 0 && stop && stop()) return s;
    if (x.what == action::copy) {
      const auto v = x.value();
      const auto& link = *p.link(x.from, x.to);
      auto& stream = queues[link.stream];
      const double possible = std::max(stream.free, ready(v, x.from));
      const auto least = std::max({stream.place, put(v, x.from), left(v, x.to)});
      const auto limit = x.to == device_tier ? budget : p.capacity(x.to);
      auto to = i;
      while (to > least && list[to].clock > possible && memory[x.to].at(to - 1) + size(v) <= limit) --to;
      memory[x.to].add(to, i, size(v));
      list[to].before.push_back(list[i].what);
      stream = {to, std::max(possible, list[to].clock) + link.latency + static_cast<double>(size(v)) / link.rate};
      ready(v, x.to) = stream.free;
      put(v, x.to) = to;
    } else {
      const auto& op = p.operations()[x.operation()];
      for (const auto& o : op.overwrites) left(o.input, op.on) = at;
      for (auto v : op.outputs) {
        put(v, op.on) = at;
        ready(v, op.on) = list[i].end;
      }
    }
    for (const auto& d : list[i].then) left(d.value(), d.from) = at;
  }
  schedule early{std::move(first), s.starts};
  for (auto& x : list) {
    early.steps.insert(early.steps.end(), x.before.begin(), x.before.end());
    if (x.what.what == action::compute) early.steps.push_back(x.what);
    early.steps.insert(early.steps.end(), x.then.begin(), x.then.end());
  }
  return early;
}

}  // namespace detail

/// Makes a schedule faster: repeats `with_early_copies` and `time_sorter` as long as that shortens the time.
/// @param s      a valid schedule of a problem that is not plain; replaced by a faster schedule
/// @param e      the result of `evaluate` for `s`
/// @param budget bytes of the device; `s` fits it
/// @param stop   polled now and then; true gives up
/// @return the time of `s`, s
/// Complexity: that of `evaluate`, `with_early_copies` and `time_sorter`, once more than the schedule gets faster.
inline double tighten(const problem& p, schedule& s, evaluation e, bytes_t budget, const std::function<bool()>& stop = {}) {
  for (;;) {
    auto other = detail::with_early_copies(p, s, e, budget, stop);
    other = detail::time_sorter(p, other, budget, stop).list();
    if (s.steps.size() >= copy_options::polled_every && stop && stop()) return e.seconds;
    auto then = evaluate(p, other);
    if (!(then.seconds < e.seconds * (1 - 1e-4))) return e.seconds;
    s = std::move(other);
    e = std::move(then);
  }
}

}  // namespace remat::copies
