// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem for a device and one more tier. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/copy_bound.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::bound {

namespace detail {

/// A plain problem with copies that every schedule of `p` is one of, as far as time and the device's memory go: what may be on
/// the host without having been sent, outputs in the places of inputs, and targets of cyclic schedules, which nobody awaits, take
/// no room; the host computes nothing.
inline problem as_plain(const problem& p) {
  auto values = p.values();
  const auto& ops = p.operations();
  for (value_id v = 0; v < values.size(); ++v) {
    const bool from_host = p.is_source(v) ? values[v].starts != device_tier : ops[p.producer(v)].on != device_tier;
    if (from_host) values[v].bytes = 0;
    values[v].starts = values[v].ends = device_tier;
  }
  for (auto v : p.targets())
    if (!p.next().empty()) values[v].bytes = 0;
  std::vector<operation> operations;
  std::vector<value_id> targets;
  std::vector<bool> made(values.size(), false);
  for (auto v : p.targets())
    if (p.values()[v].ends == device_tier) targets.push_back(v);
  for (auto o : needed_operations(p)) {
    if (ops[o].on != device_tier) continue;
    auto op = ops[o];
    for (auto v : op.outputs) made[v] = true;
    for (const auto& x : op.overwrites) values[x.output].bytes = 0;
    op.once = op.once || !op.overwrites.empty();
    op.overwrites.clear();
    targets.push_back(values.size());  // it runs, even if only the host reads what it makes
    op.outputs.push_back(values.size());
    values.push_back({.name = "done", .bytes = 0});
    operations.push_back(std::move(op));
  }
  for (value_id v = 0; v < made.size(); ++v) {
    if (!p.is_source(v) && !made[v]) values[v].bytes = 0;
    values[v].held = values[v].held && values[v].bytes > 0;
  }
  const auto &up = *p.link(device_tier, 1), &down = *p.link(1, device_tier);
  return {p.name(), std::move(values), std::move(operations), std::move(targets),
          copy_rates{up.rate, down.rate, std::min(up.latency, down.latency)}};
}

}  // namespace detail

/// The seconds of what has to pass through each queue besides the device's: over the links, what starts or is made on one tier
/// and is read or ends on the other; and the operations on the host.
/// @return the longest
/// Complexity: O(values + edges).
inline double queue_bound(const problem& p, bytes_t budget) {
  const auto& ops = p.operations();
  std::vector<bool> up(p.values().size(), false), down = up;
  double computed = 0;
  for (auto o : needed_operations(p)) {
    if (ops[o].on != device_tier) computed += ops[o].seconds;
    for (auto v : ops[o].inputs) (ops[o].on == device_tier ? down : up)[v] = true;
  }
  std::vector<tier_id> ends(p.values().size(), any_tier);
  for (auto v : p.targets()) ends[v] = p.values()[v].ends;
  for (const auto& c : p.next())
    if (p.values()[c.source].starts != any_tier) ends[c.target] = p.values()[c.source].starts;
  std::map<std::string, double> queues;
  bytes_t anywhere = p.source_bytes() - budget;  // of sources read on the device, beyond those that may start there
  for (value_id v = 0; v < p.values().size(); ++v) {
    const auto& x = p.values()[v];
    const auto starts = p.is_source(v) ? x.starts : ops[p.producer(v)].on;
    const bool awaited = p.next().empty() || !p.is_target(v);
    const auto pass = [&](tier_id from, tier_id to) {
      const auto& l = *p.link(from, to);
      queues[l.stream] += l.latency + static_cast<double>(x.bytes) / l.rate;
    };
    if (starts == device_tier && (up[v] || ends[v] == 1)) pass(device_tier, 1);
    if (starts == 1 && (down[v] || (ends[v] == device_tier && awaited))) pass(1, device_tier);
    if (starts == any_tier && down[v]) anywhere += x.bytes;
  }
  const auto& l = *p.link(1, device_tier);
  if (anywhere > 0) queues[l.stream] += static_cast<double>(anywhere) / l.rate;
  double longest = computed;
  for (const auto& [stream, seconds] : queues) longest = std::max(longest, seconds);
  return longest;
}

/// A lower bound on the time, of cyclic schedules the period, of every schedule of a problem for a device and one more tier that
/// are linked both ways: `copy_bound` of what the device computes, where what may start on the host takes no room, and
/// `queue_bound`.
/// @param p      a problem with two tiers
/// @param budget bytes, of the device
/// @param stop   polled between cuts; true returns what is proven by then
/// @return no schedule within the budget is faster, s
/// @throws bad_option if there are more tiers, or links are missing
/// Complexity: that of `copy_bound`.
/// @code
/// std::cout << "no step takes less than " << remat::bound::tier_bound(p, budget) << " s\n";
/// @endcode
inline double tier_bound(const problem& p, bytes_t budget, const std::function<bool()>& stop = {}) {
  if (p.tiers().size() != 2 || !p.link(device_tier, 1) || !p.link(1, device_tier))
    throw bad_option("tier_bound: the problem has not two tiers that are linked both ways");
  const double queues = std::max(queue_bound(p, budget), bounds_without_search(p).seconds);
  const auto plain = detail::as_plain(p);
  if (bounds_without_search(plain).budget > budget) return queues;
  return std::max(queues, copy_bound(plain, budget, {}, stop));
}

}  // namespace remat::bound
