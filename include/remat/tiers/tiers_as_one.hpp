// SPDX-License-Identifier: Apache-2.0
/// @file
/// Relaxations that take the device and the tiers next to it for one memory: parts of the lower bounds. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include <remat/bound/retention_cut.hpp>
#include <remat/copies/placement.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/tiers/tier_places.hpp>

namespace remat::tiers {

namespace detail {

/// One link in place of all links that leave a set of tiers, or of all that enter it. It is at least as fast as all of them
/// together.
/// @param outwards true: links from `inside` to the other tiers; false: links to `inside`
/// @return a link of rate 0 if there are none
inline copy_link links_across(const problem& p, tier_set inside, bool outwards) {
  copy_link all{device_tier, device_tier};
  double least = std::numeric_limits<double>::infinity();
  for (const auto& l : p.links()) {
    if (inside.has(outwards ? l.to : l.from) || !inside.has(outwards ? l.from : l.to)) continue;
    all.rate += l.rate;
    least = std::min(least, l.latency * l.rate);
  }
  all.rate = std::min(all.rate, std::numeric_limits<double>::max());
  all.latency = all.rate > 0 && std::isfinite(least) ? least / all.rate : 0;
  return all;
}

/// A relaxation of a problem with several tiers: some tiers, the device among them, become one device, and all others one host.
/// Every schedule of the original problem gives a schedule of the relaxed one with the same time and no more memory.
struct plain_relaxation {
  problem p;
  std::vector<operation_id> operations;  ///< the operations of the original problem that `p` has, in its order
};

/// Makes the relaxation for the tiers `inside`. A value that may lie outside without a copy to the outside takes no room.
/// Operations on other tiers than the device take no time. A value that has to leave becomes a target that ends on the host. A
/// value that may leave at the end becomes a target that ends anywhere; so do all targets of a cyclic schedule, because no
/// operation waits for them.
/// @param count_outside_sources true: sources that start outside, on a known tier, start on the host; false: they take no room
/// @param places `find_places` of `p`
/// Complexity: O(values + edges + links).
inline plain_relaxation relax_to_plain(const problem& p, tier_set inside, bool count_outside_sources,
                                       const value_places& places) {
  auto values = p.values();
  const auto& ops = p.operations();
  const auto needed = needed_operations(p);
  std::vector<bool> made_inside(values.size(), false);  // starts or is made inside
  for (value_id v = 0; v < values.size(); ++v) made_inside[v] = p.is_source(v) && inside.has(values[v].starts);
  for (auto o : needed)
    for (auto v : ops[o].outputs) made_inside[v] = inside.has(ops[o].on);
  std::vector<value_id> targets;
  for (value_id v = 0; v < values.size(); ++v) {
    const bool comes = count_outside_sources && p.is_source(v) && !made_inside[v] && values[v].starts != any_tier;
    const bool leaves = std::any_of(places.wanted[v].begin(), places.wanted[v].end(), [&](tier_id t) { return !inside.has(t); });
    const bool stays = p.is_target(v) && p.next().empty() && inside.has(values[v].ends);
    if (!made_inside[v] && !comes) values[v].bytes = 0;
    values[v].held = values[v].held && made_inside[v] && values[v].bytes > 0;
    values[v].starts = comes ? tier_id(1) : device_tier;
    values[v].ends = device_tier;
    if (!made_inside[v] || !(p.is_target(v) || leaves)) continue;
    targets.push_back(v);
    if (!stays) values[v].ends = leaves ? tier_id(1) : any_tier;
  }
  plain_relaxation relaxed;
  std::vector<operation> operations;
  for (auto o : needed) {
    if (!inside.has(ops[o].on)) continue;
    auto op = ops[o];
    if (op.on != device_tier) op.seconds = 0;
    op.on = device_tier;
    op.once = op.once || !op.overwrites.empty();
    std::erase_if(op.overwrites, [&](const auto& x) { return values[x.output].bytes != values[x.input].bytes; });
    targets.push_back(values.size());  // `op` must run even if only operations outside read its outputs
    op.outputs.push_back(values.size());
    values.push_back({.name = "done", .bytes = 0});
    relaxed.operations.push_back(o);
    operations.push_back(std::move(op));
  }
  const auto up = links_across(p, inside, true), down = links_across(p, inside, false);
  relaxed.p = {p.name(), std::move(values), std::move(operations), std::move(targets),
               copy_rates{up.rate, down.rate, std::min(up.latency, down.latency)}};
  return relaxed;
}

/// Adds up the copies between the tiers `inside` and the others that every schedule makes.
/// @param plain the problem of the relaxation that `relax_to_plain` makes of `p` and `inside`
/// @param places `find_places` of `p`
/// @return only `to_host` and `to_device`, s
inline bound::time_span unavoidable_copies(const problem& p, const problem& plain, tier_set inside, const value_places& places) {
  bound::time_span all;
  const auto& link = *plain.copies();
  for (value_id v = 0; v < p.values().size(); ++v) {
    if (places.made[v] == any_tier) continue;
    const bool comes = !inside.has(places.made[v]);
    if (std::none_of(places.wanted[v].begin(), places.wanted[v].end(), [&](tier_id t) { return inside.has(t) == comes; }))
      continue;
    if (!comes && plain.values()[v].bytes > 0 && plain.values()[v].ends != 1) continue;  // a copy that the cut already counts
    (comes ? all.to_device : all.to_host) +=
        link.latency + static_cast<double>(p.values()[v].bytes) / (comes ? link.to_device : link.to_host);
  }
  return all;
}

/// True if `t` is the only tier of `inside` with links to or from the other tiers.
inline bool is_gate(const problem& p, tier_set inside, tier_id t) {
  return std::all_of(p.links().begin(), p.links().end(), [&](const copy_link& l) {
    return inside.has(l.from) == inside.has(l.to) || (inside.has(l.from) ? l.from : l.to) == t;
  });
}

/// The first tiers of the chain, taken for one memory.
struct tier_prefix {
  tier_set tiers;
  bytes_t budget;  // of all these tiers, bytes
};

/// All prefixes of the chain that have a limit, and leave out at least the last tier; the device alone first.
/// @param budget bytes of the device
inline std::vector<tier_prefix> tier_prefixes(const problem& p, bytes_t budget) {
  const auto chain = copies::tier_chain(p);
  std::vector<tier_prefix> all;
  tier_prefix prefix{tier_set{}, clamp_budget(budget)};
  for (std::size_t i = 0; i + 1 < chain.size(); ++i) {
    if (i > 0 && !p.tiers()[chain[i]].budget) break;
    if (i > 0) prefix.budget += p.capacity(chain[i]);
    prefix.tiers.add(chain[i]);
    all.push_back(prefix);
  }
  return all;
}

}  // namespace detail

}  // namespace remat::tiers
