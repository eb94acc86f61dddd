// SPDX-License-Identifier: Apache-2.0
/// @file
/// Problems for a device and one more tier, as `lay_copies` sees them: where values start and end, and which orders respect that
/// some operations write over what others read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::order {

inline constexpr tier_id far_tier = 1;  ///< the tier besides the device, here called the host

/// Where values are at first and at the end.
struct residence {
  /// Where a value must be at the end.
  enum class place : unsigned char { nowhere, device, host, anywhere };
  std::vector<tier_id> homes;   ///< of each source; `any_tier` for what operations make
  std::vector<place> ends;      ///< of each value
  std::vector<bool> undecided;  ///< of each value: the problem leaves it to the schedule where it starts

  /// Is `v` on the device at first or made there?
  bool starts_on_device(const problem& p, value_id v) const {
    return (p.is_source(v) ? homes[v] : p.operations()[p.producer(v)].on) == device_tier;
  }
};

/// @param p     a problem without an `unplannable` member
/// @param other where the sources that may start anywhere do; `any_tier`: on the host, and what replaces them ends anywhere,
/// which
///              is no schedule of a cyclic problem yet but tells what would stay on the device
/// Complexity: O(values).
inline residence find_residence(const problem& p, std::span<const tier_id> other) {
  using place = residence::place;
  const auto as_place = [](tier_id t) {
    return t == device_tier ? place::device : t == far_tier ? place::host : place::anywhere;
  };
  const auto& values = p.values();
  residence r{std::vector<tier_id>(values.size(), any_tier), std::vector<place>(values.size(), place::nowhere),
              std::vector<bool>(values.size(), false)};
  for (auto v : p.targets()) r.ends[v] = as_place(values[v].ends);
  std::vector<bool> replaced(values.size(), false);
  for (const auto& c : p.next()) {
    replaced[c.source] = true;
    r.homes[c.source] = values[c.source].starts != any_tier ? values[c.source].starts : values[c.target].ends;
  }
  for (value_id v = 0; v < values.size(); ++v) {
    if (!p.is_source(v)) continue;
    const bool stays = !p.next().empty() && !replaced[v];
    if (!replaced[v]) r.homes[v] = values[v].starts;
    if (r.homes[v] == any_tier && stays && p.is_target(v)) r.homes[v] = values[v].ends;
    if (r.homes[v] == any_tier && !values[v].movable) {
      const auto reader = p.consumers(v);
      r.homes[v] = reader.empty() ? far_tier : p.operations()[reader.front()].on;
    }
    r.undecided[v] = r.homes[v] == any_tier;
    const auto chosen = r.undecided[v] ? other[v] : r.homes[v];
    if (r.undecided[v]) r.homes[v] = chosen == any_tier ? far_tier : chosen;
    if (stays) r.ends[v] = as_place(chosen);
  }
  for (const auto& c : p.next())
    r.ends[c.target] = r.undecided[c.source] ? as_place(other[c.source]) : as_place(r.homes[c.source]);
  return r;
}

/// The order as it has to be where operations overwrite values: these come after everything that reads such a value. Operations
/// on the host, and those that overwrite, run once.
/// @return nothing if there is no such order that is near, or if the order reads what is not made
/// Complexity: O(values + edges executed).
inline std::optional<std::vector<operation_id>> overwrite_last(const problem& p, std::span<const operation_id> order) {
  const auto& ops = p.operations();
  const auto runs_once = [&](operation_id o) { return ops[o].on != device_tier || !ops[o].overwrites.empty(); };
  struct place {
    std::size_t position;
    bool after;  // what is there
    operation_id operation;
  };
  std::vector<place> placed;
  std::vector<std::size_t> last(p.values().size(), 0);
  std::vector<bool> has_run(ops.size(), false);
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (runs_once(order[i]) && has_run[order[i]]) continue;
    has_run[order[i]] = true;
    for (auto v : ops[order[i]].inputs) last[v] = i;
    placed.push_back({i, false, order[i]});
  }
  bool moved = false;
  for (auto& [position, after, o] : placed)
    for (const auto& x : ops[o].overwrites)
      if (last[x.input] > position) position = last[x.input], moved = after = true;
  if (moved)
    std::stable_sort(placed.begin(), placed.end(), [](const place& a, const place& b) {
      return std::pair(a.position, a.after) < std::pair(b.position, b.after);
    });
  enum : unsigned char { missing, there, overwritten };
  std::vector<unsigned char> state(p.values().size(), missing);
  for (value_id v = 0; v < state.size(); ++v)
    if (p.is_source(v)) state[v] = there;
  std::vector<operation_id> list;
  for (const auto& [position, after, o] : placed) {
    for (auto v : ops[o].inputs)
      if (state[v] != there) return std::nullopt;
    for (const auto& x : ops[o].overwrites) state[x.input] = overwritten;
    for (auto v : ops[o].outputs) state[v] = there;
    list.push_back(o);
  }
  return list;
}

/// What `lay_copies` cannot do with a problem that is not plain, such as "links: none from the device to the host"; empty if it
/// can.
/// Complexity: O(values + edges).
inline std::string unplannable(const problem& p) {
  const auto& values = p.values();
  const auto& ops = p.operations();
  const auto value = [](value_id v, const std::string& why) { return "values[" + std::to_string(v) + "]" + why; };
  if (p.tiers().size() != 2)
    return "tiers: plans are made for a device and one more, and there are " + std::to_string(p.tiers().size());
  for (const auto& [from, to] : {std::pair(device_tier, far_tier), std::pair(far_tier, device_tier)})
    if (!p.link(from, to)) return "links: none from the " + p.tiers()[from].name + " to the " + p.tiers()[to].name;
  std::vector<bool> replaced(values.size(), false), overwritten = replaced;
  for (const auto& c : p.next()) {
    replaced[c.source] = true;
    if (p.is_target(c.source)) return value(c.source, ": a target whose place another takes in the next step");
  }
  const auto needed = needed_operations(p);
  for (auto o : needed)
    for (const auto& x : ops[o].overwrites) {
      const bool stays = p.is_source(x.input) && !p.next().empty() && !replaced[x.input];
      if (overwritten[x.input]) return value(x.input, ": two operations overwrite it");
      overwritten[x.input] = true;
      if (p.is_target(x.input) || stays) return value(x.input, ": an operation overwrites it, and it must be there at the end");
    }
  if (!overwrite_last(p, needed)) return "operations: one reads what another overwrites, and comes after it";
  const auto r = find_residence(p, std::vector<tier_id>(values.size(), far_tier));
  const auto kept = [&](value_id v, tier_id t) {
    return values[v].movable || r.undecided[v] || r.starts_on_device(p, v) == (t == device_tier);
  };
  for (auto o : needed)
    for (auto v : ops[o].inputs)
      if (!kept(v, ops[o].on)) return value(v, ".movable: it may not be copied, and is read on another tier");
  for (value_id v = 0; v < values.size(); ++v) {
    const auto end = r.ends[v];
    const bool stays = p.is_source(v) && !p.next().empty() && !replaced[v] && p.is_target(v);
    if (stays && values[v].ends != any_tier && values[v].ends != r.homes[v])
      return value(v, ".ends: another tier than that where the next step needs it");
    if (end == residence::place::nowhere || end == residence::place::anywhere) continue;
    if (!kept(v, end == residence::place::device ? device_tier : far_tier))
      return value(v, ".movable: it may not be copied, and ends on another tier");
  }
  return {};
}

/// The recomputation alone of a problem for two tiers: operations on the host take no time and run once, and what starts or is
/// wanted on the host takes no room, as it comes and goes. Orders of one are orders of the other (`overwrite_last`).
/// Complexity: O(values + edges).
inline problem without_host(const problem& p) {
  const auto r = find_residence(p, std::vector<tier_id>(p.values().size(), any_tier));
  auto values = p.values();
  auto operations = p.operations();
  for (value_id v = 0; v < values.size(); ++v) {
    const auto readers = p.consumers(v);
    const bool goes = !r.starts_on_device(p, v) || r.ends[v] == residence::place::host ||
                      r.ends[v] == residence::place::anywhere ||
                      std::any_of(readers.begin(), readers.end(), [&](auto o) { return operations[o].on != device_tier; });
    if (goes) values[v].bytes = 0, values[v].held = false;
    values[v].starts = values[v].ends = device_tier;
  }
  for (auto& op : operations) {
    op.once = op.once || op.on != device_tier || !op.overwrites.empty();
    if (op.on != device_tier) op.seconds = 0, op.workspace = 0;
    op.on = device_tier;
    op.overwrites.clear();
  }
  return {p.name(), std::move(values), std::move(operations), p.targets(), std::nullopt, p.backward_start()};
}

}  // namespace remat::order
