// SPDX-License-Identifier: Apache-2.0
/// @file
/// How `schedule_copies` sees a problem on several tiers: as a device and a host that stands for all other tiers. Finds where
/// values start and end, and orders in which operations overwrite a value only after all its readers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies {

/// The chain of tiers that values pass through on their way from the device. Each tier is linked both ways with the tier before
/// it. The next tier is always the one with the fastest links among those left. Links that skip a tier of the chain are not used.
/// @return the tiers of the chain, the device first
/// Complexity: O(tiers^2 links).
inline std::vector<tier_id> tier_chain(const problem& p) {
  std::vector<tier_id> chain = {device_tier};
  for (bool longer = true; longer;) {
    longer = false;
    double fastest = 0;
    tier_id next = device_tier;
    for (tier_id t = 0; t < p.tiers().size(); ++t) {
      const auto *up = p.link(chain.back(), t), *down = p.link(t, chain.back());
      if (!up || !down || std::find(chain.begin(), chain.end(), t) != chain.end()) continue;
      if (const double rate = std::min(up->rate, down->rate); rate > fastest) fastest = rate, next = t, longer = true;
    }
    if (longer) chain.push_back(next);
  }
  return chain;
}

/// Where values are at the start and at the end. The host stands for all tiers but the device.
struct placement {
  /// Where a value must be at the end.
  enum class place : unsigned char { nowhere, device, host, anywhere };
  tier_id neighbour;            ///< the tier after the device in the chain; all copies to and from the device use it
  std::vector<tier_id> homes;   ///< of each source; `any_tier` for values that operations make
  std::vector<place> ends;      ///< of each value
  std::vector<bool> undecided;  ///< of each value: the schedule may choose where it starts

  /// True if `v` starts on the device or is made there.
  bool starts_on_device(const problem& p, value_id v) const {
    return (p.is_source(v) ? homes[v] : p.operations()[p.producer(v)].on) == device_tier;
  }
};

/// Finds where values start and end.
/// @param p     a problem for which `why_unplannable` is empty
/// @param other per value: where a source starts that may start anywhere. `any_tier`: the source starts on the host, and its
///              replacement ends anywhere. That gives no cyclic schedule yet, but shows which values would stay on the device
/// Complexity: O(values).
inline placement find_placement(const problem& p, std::span<const tier_id> other) {
  using place = placement::place;
  const auto as_place = [](tier_id t) {
    return t == device_tier ? place::device : t == any_tier ? place::anywhere : place::host;
  };
  const auto& values = p.values();
  const auto neighbour = tier_chain(p).at(1);
  placement r{neighbour, std::vector<tier_id>(values.size(), any_tier), std::vector<place>(values.size(), place::nowhere),
              std::vector<bool>(values.size(), false)};
  for (auto v : p.targets()) r.ends[v] = as_place(values[v].ends);
  std::vector<bool> replaced(values.size(), false);
  for (const auto& c : p.next()) {
    replaced[c.source] = true;
    auto& home = r.homes[c.source];
    home = values[c.source].starts != any_tier ? values[c.source].starts : values[c.target].ends;
    if (home == any_tier && !values[c.target].movable) home = p.operations()[p.producer(c.target)].on;
  }
  for (value_id v = 0; v < values.size(); ++v) {
    if (!p.is_source(v)) continue;
    const bool stays = !p.next().empty() && !replaced[v];
    if (!replaced[v]) r.homes[v] = values[v].starts;
    if (r.homes[v] == any_tier && stays && p.is_target(v)) r.homes[v] = values[v].ends;
    if (r.homes[v] == any_tier && !values[v].movable) {
      const auto reader = p.consumers(v);
      r.homes[v] = reader.empty() ? neighbour : p.operations()[reader.front()].on;
    }
    r.undecided[v] = r.homes[v] == any_tier;
    const auto chosen = r.undecided[v] ? other[v] : r.homes[v];
    if (r.undecided[v]) r.homes[v] = chosen == any_tier ? neighbour : chosen;
    if (stays) r.ends[v] = as_place(chosen);
  }
  for (const auto& c : p.next())
    r.ends[c.target] = r.undecided[c.source] ? as_place(other[c.source]) : as_place(r.homes[c.source]);
  return r;
}

/// Moves each operation that overwrites a value behind all readers of that value. Operations on the host, and operations that
/// overwrite, run only the first time.
/// @return the order; nothing if the moves make it invalid, or if it reads a value that has not been made
/// Complexity: O(values + edges executed).
inline std::optional<std::vector<operation_id>> readers_before_overwrites(const problem& p, std::span<const operation_id> order) {
  const auto& ops = p.operations();
  const auto runs_once = [&](operation_id o) { return ops[o].on != device_tier || !ops[o].overwrites.empty(); };
  struct place {
    std::size_t position;
    bool after;  // moved behind the operation at `position`
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

/// Why `schedule_copies` cannot plan a problem that is not plain, such as "links: none from the device to the host"; empty if it
/// can. Complexity: O(values + edges).
inline std::string why_unplannable(const problem& p) {
  const auto& values = p.values();
  const auto& ops = p.operations();
  const auto value = [](value_id v, const std::string& why) { return "values[" + std::to_string(v) + "]" + why; };
  const auto needed = needed_operations(p);
  const auto chain = tier_chain(p);
  if (chain.size() == 1 || p.tiers().size() == 2) {
    if (p.tiers().size() < 2) return "tiers: there is none besides the device";
    for (const auto& [from, to] : {std::pair(device_tier, tier_id(1)), std::pair(tier_id(1), device_tier)})
      if (!p.link(from, to)) return "links: none from the " + p.tiers()[from].name + " to the " + p.tiers()[to].name;
  }
  const auto misses = [&](tier_id t) { return t != any_tier && std::find(chain.begin(), chain.end(), t) == chain.end(); };
  const auto off = [&](tier_id t, const std::string& what) {
    std::string names;
    for (auto x : chain) names += (names.empty() ? "" : ", ") + p.tiers()[x].name;
    return what + ": the " + p.tiers()[t].name + " is on no chain of tiers that are linked both ways (" + names + ")";
  };
  for (value_id v = 0; v < values.size(); ++v) {
    if (misses(values[v].starts)) return off(values[v].starts, "values[" + std::to_string(v) + "].starts");
    if (misses(values[v].ends)) return off(values[v].ends, "values[" + std::to_string(v) + "].ends");
  }
  for (auto o : needed)
    if (misses(ops[o].on)) return off(ops[o].on, "operations[" + std::to_string(o) + "].on");
  std::vector<bool> replaced(values.size(), false), overwritten = replaced;
  for (const auto& c : p.next()) {
    replaced[c.source] = true;
    if (p.is_target(c.source)) return value(c.source, ": a target whose place another takes in the next step");
  }
  for (auto o : needed)
    for (const auto& x : ops[o].overwrites) {
      const bool stays = p.is_source(x.input) && !p.next().empty() && !replaced[x.input];
      if (overwritten[x.input]) return value(x.input, ": two operations overwrite it");
      overwritten[x.input] = true;
      if (p.is_target(x.input) || stays) return value(x.input, ": an operation overwrites it, and it must be there at the end");
    }
  if (!readers_before_overwrites(p, needed)) return "operations: one reads what another overwrites, and comes after it";
  const auto r = find_placement(p, std::vector<tier_id>(values.size(), chain[1]));
  const auto kept = [&](value_id v, tier_id t) {
    return values[v].movable || r.undecided[v] || (p.is_source(v) ? r.homes[v] : ops[p.producer(v)].on) == t;
  };
  for (auto o : needed)
    for (auto v : ops[o].inputs)
      if (!kept(v, ops[o].on)) return value(v, ".movable: it may not be copied, and is read on another tier");
  for (value_id v = 0; v < values.size(); ++v) {
    const bool stays = p.is_source(v) && !p.next().empty() && !replaced[v];
    if (!p.is_target(v)) continue;
    if (stays && values[v].ends != any_tier && values[v].ends != r.homes[v])
      return value(v, ".ends: another tier than that where the next step needs it");
    if (values[v].ends != any_tier && !kept(v, values[v].ends))
      return value(v, ".movable: it may not be copied, and ends on another tier");
  }
  for (const auto& c : p.next())
    if (!kept(c.target, r.homes[c.source])) return value(c.target, ".movable: it may not be copied, and ends on another tier");
  return {};
}

/// A plain problem without copies: the recomputation alone of a problem on several tiers. Operations on other tiers take no time
/// and run once. Values that start, are made, are read or end on other tiers take no room, because they come and go. Each order
/// of one problem is an order of the other, after `readers_before_overwrites`.
/// Complexity: O(values + edges).
inline problem recomputation_only(const problem& p) {
  const auto r = find_placement(p, std::vector<tier_id>(p.values().size(), any_tier));
  auto values = p.values();
  auto operations = p.operations();
  for (value_id v = 0; v < values.size(); ++v) {
    const auto readers = p.consumers(v);
    const bool goes = !r.starts_on_device(p, v) || r.ends[v] == placement::place::host ||
                      r.ends[v] == placement::place::anywhere ||
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

}  // namespace remat::copies
