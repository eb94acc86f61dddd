// SPDX-License-Identifier: Apache-2.0
/// @file
/// Drops of a schedule on several tiers, where they hold up least.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <remat/core/evaluate_tiers.hpp>
#include <remat/core/evaluation.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::order::detail {

/// Puts off drops, which make all that comes to their tier later wait until what is dropped is read no more: until that is so, or
/// room is lacking, then first those that are read no more first.
/// @param s      a valid schedule of a problem that is not plain
/// @param e      what `evaluate` says of it
/// @param budget bytes, of the device, within which it is
/// @return one with the same steps otherwise, within the same budgets; not always faster
/// Complexity: O(steps), times the values of one tier that are done with but still read.
inline schedule with_late_drops(const problem& p, const schedule& s, const evaluation& e, bytes_t budget) {
  struct leaving {
    double quiet;  // when nothing reads it any more, s
    value_id value;
  };
  remat::detail::tier_table<double> busy(p);
  remat::detail::tier_table<bytes_t> here(p);
  std::vector<bytes_t> live(p.tiers().size(), 0);
  std::vector<std::vector<leaving>> pending(live.size());
  schedule late{{}, s.starts};
  const auto put = [&](value_id v, tier_id t) {
    live[t] += p.values()[v].bytes - std::exchange(here(v, t), p.values()[v].bytes);
  };
  const auto take = [&](value_id v, tier_id t) { live[t] -= std::exchange(here(v, t), 0); };
  const auto drop = [&](tier_id t, std::vector<leaving>::iterator x) {
    take(x->value, t);
    late.drop(x->value, t);
    return pending[t].erase(x);
  };
  const auto make_room = [&](tier_id t, bytes_t more, const auto& comes) {
    auto& list = pending[t];
    for (auto x = list.begin(); x != list.end();) x = comes(x->value) ? drop(t, x) : x + 1;
    const auto most = t == device_tier ? budget : p.tiers()[t].budget.value_or(max_bytes);
    while (live[t] + more > most && !list.empty())
      drop(t, std::min_element(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.quiet < b.quiet; }));
  };
  for (value_id v = 0; v < p.values().size(); ++v)
    if (p.is_source(v) && p.values()[v].starts != any_tier) put(v, p.values()[v].starts);
  for (const auto& [v, t] : s.starts) put(v, t);
  auto copy = e.copies.begin();
  double now = 0;
  for (std::size_t k = 0; k < s.steps.size(); ++k) {
    const auto x = remat::detail::with_tiers(p, s.steps[k]);
    if (x.what == action::drop) {
      pending[x.from].push_back({busy(x.value(), x.from), x.value()});
      continue;
    }
    if (x.what == action::copy) {
      make_room(x.to, p.values()[x.value()].bytes, [&](value_id v) { return v == x.value(); });
      put(x.value(), x.to);
      busy(x.value(), x.to) = copy->end;
      busy(x.value(), x.from) = std::max(busy(x.value(), x.from), copy->end);
      ++copy;
    } else {
      const auto& op = p.operations()[x.operation()];
      auto more = op.workspace;
      for (auto v : op.outputs) more += p.values()[v].bytes;
      for (const auto& o : op.overwrites) more -= p.values()[o.output].bytes;
      make_room(op.on, more, [&](value_id v) { return std::find(op.outputs.begin(), op.outputs.end(), v) != op.outputs.end(); });
      for (auto v : op.inputs) busy(v, op.on) = std::max(busy(v, op.on), e.ends[k]);
      for (const auto& o : op.overwrites) take(o.input, op.on);
      for (auto v : op.outputs) {
        put(v, op.on);
        busy(v, op.on) = e.ends[k];
      }
      if (op.on == device_tier) now = e.ends[k];
    }
    late.steps.push_back(s.steps[k]);
    for (tier_id t = 0; t < live.size(); ++t)
      for (auto d = pending[t].begin(); d != pending[t].end();) d = d->quiet <= now ? drop(t, d) : d + 1;
  }
  for (tier_id t = 0; t < live.size(); ++t)
    while (!pending[t].empty()) drop(t, pending[t].begin());
  return late;
}

}  // namespace remat::order::detail
