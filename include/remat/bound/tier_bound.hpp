// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem for a device and one more tier. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <limits>
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

namespace detail {

/// What has to happen between a source that one step leaves to the next and the target that takes its place, or between the
/// begin and a target.
class tier_path {
 public:
  tier_path(const problem& p, const std::vector<operation_id>& needed) : p_(p), needed_(needed) {}

  /// @param from  a source, or `none`: all of them
  /// @param to    a target that operations produce
  /// @param there where it must be
  /// @return at least so long, s: the longest chain of operations and copies; and, of all operations on the device in between,
  ///         which follow one another, the sum, the least before the first and the least after the last
  double seconds(value_id from, value_id to, tier_id there) const {
    std::vector<times> before(p_.values().size(), {never, never}), after = before;
    for (value_id v = 0; v < before.size(); ++v)
      if (p_.is_source(v) && (from == none || v == from)) {
        const auto home = p_.values()[v].starts;
        before[v] = home == any_tier ? times{0, 0} : at(v, home, 0);
      }
    const auto first = [&](const operation& op) {
      double begin = from == none ? 0 : never;
      for (auto v : op.inputs) begin = std::max(begin, before[v][op.on]);
      return begin;
    };
    for (auto o : needed_) {
      const auto& op = p_.operations()[o];
      for (auto v : op.outputs) before[v] = at(v, op.on, first(op) + op.seconds);
    }
    for (tier_id t : {device_tier, tier_id(1)}) after[to][t] = there == any_tier || t == there ? 0 : copy(to, t);
    double sum = 0, head = -never, tail = -never;
    for (auto o = needed_.rbegin(); o != needed_.rend(); ++o) {
      const auto& op = p_.operations()[*o];
      double end = never;
      for (auto v : op.outputs) end = std::max(end, after[v][op.on]);
      for (auto v : op.inputs)
        for (tier_id t : {device_tier, tier_id(1)})
          after[v][t] = std::max(after[v][t], op.seconds + end + (t == op.on ? 0 : copy(v, t)));
      if (op.on != device_tier || end == never || first(op) == never) continue;
      sum += op.seconds;
      head = std::min(head, first(op));
      tail = std::min(tail, end);
    }
    const auto& made = before[to];
    const double longest = there == any_tier ? std::min(made[0], made[1]) : made[there];
    return std::max({0.0, longest, sum > 0 ? head + sum + tail : 0});
  }

 private:
  using times = std::array<double, 2>;
  static constexpr double never = -std::numeric_limits<double>::infinity();

  double copy(value_id v, tier_id from) const {
    const auto& l = *p_.link(from, tier_id(from == device_tier ? 1 : 0));
    return l.latency + static_cast<double>(p_.values()[v].bytes) / l.rate;
  }
  /// When `v`, which is on `t` then, can be where.
  times at(value_id v, tier_id t, double then) const {
    const double other = then + copy(v, t);
    return t == device_tier ? times{then, other} : times{other, then};
  }

  const problem& p_;
  const std::vector<operation_id>& needed_;
};

}  // namespace detail

/// The longest of what has to happen one after another: before a target is where it must end; or, where steps repeat, between a
/// source and the target that takes its place.
/// @param p    a problem with two tiers
/// @param most ends looked at, those that are made last
/// Complexity: O(most (values + edges)).
inline double path_bound(const problem& p, std::size_t most = 64) {
  const auto needed = needed_operations(p);
  struct path {
    value_id from, to;
    tier_id there;
  };
  std::vector<path> paths;
  for (const auto& c : p.next()) paths.push_back({c.source, c.target, p.values()[c.source].starts});
  if (p.next().empty())
    for (auto v : p.targets())
      if (!p.is_source(v)) paths.push_back({none, v, p.values()[v].ends});
  std::sort(paths.begin(), paths.end(), [&](const path& a, const path& b) { return p.producer(a.to) > p.producer(b.to); });
  paths.resize(std::min(paths.size(), most));
  double longest = 0;
  for (const auto& x : paths) longest = std::max(longest, detail::tier_path(p, needed).seconds(x.from, x.to, x.there));
  return longest;
}

/// A lower bound on the time, of cyclic schedules the period, of every schedule of a problem for a device and one more tier that
/// are linked both ways: `copy_bound` of what the device computes, where what may start on the host takes no room, `queue_bound`
/// and `path_bound`.
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
  const double others = std::max({queue_bound(p, budget), path_bound(p), bounds_without_search(p).seconds});
  const auto plain = detail::as_plain(p);
  if (bounds_without_search(plain).budget > budget) return others;
  return std::max(others, copy_bound(plain, budget, {}, stop));
}

}  // namespace remat::bound
