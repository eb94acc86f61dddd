// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem on several tiers: how long each queue is busy. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/tiers/tier_places.hpp>
#include <remat/tiers/tiers_as_one.hpp>

namespace remat::tiers {

/// The seconds of what has to pass through each queue besides the device's: over the links, what starts or is made on one tier
/// and is read or ends on another; and the operations on each other tier.
/// @return the longest
/// Complexity: O(values + edges), times the number of tiers.
inline double queue_bound(const problem& p, bytes_t budget) {
  const auto& ops = p.operations();
  const auto& values = p.values();
  const auto links = p.links();
  const auto needed = needed_operations(p);
  const auto [places, wanted] = detail::find_places(p, needed);
  std::vector<double> computed(p.tiers().size(), 0);
  for (auto o : needed) computed[ops[o].on] += ops[o].seconds;
  std::map<std::string, double> queues;
  std::vector<std::size_t> passed;
  detail::narrow_links narrow(p);
  for (value_id v = 0; v < values.size(); ++v) {
    if (places[v] == any_tier) continue;
    passed.clear();
    for (auto t : wanted[v])
      for (auto l : narrow.between(places[v], t))
        if (std::find(passed.begin(), passed.end(), l) == passed.end()) passed.push_back(l);
    for (auto l : passed) queues[links[l].stream] += links[l].latency + static_cast<double>(values[v].bytes) / links[l].rate;
  }
  double longest = *std::max_element(computed.begin() + 1, computed.end());
  // Of what may start anywhere, that which does not fit into the tiers that read it passes into them, and where steps repeat,
  // what takes its place passes out.
  for (const auto& group : detail::tier_prefixes(p, budget)) {
    const auto inside = group.tiers;
    bytes_t fixed = -group.budget, in = 0, out = 0;
    const auto reads = [&, &wanted = wanted](value_id v) {
      return std::any_of(wanted[v].begin(), wanted[v].end(), [&](tier_id t) { return inside.has(t); });
    };
    for (value_id v = 0; v < values.size(); ++v) {
      if (!p.is_source(v)) continue;
      if (inside.has(places[v])) fixed += values[v].bytes;
      if (places[v] == any_tier && reads(v)) in += values[v].bytes;
    }
    for (const auto& c : p.next())
      if (places[c.source] == any_tier && inside.has(ops[p.producer(c.target)].on)) out += values[c.source].bytes;
    for (const bool outwards : {false, true})
      if (const auto bytes = fixed + (outwards ? out : in); bytes > 0 && (outwards ? out : in) > 0)
        if (const auto all = detail::links_across(p, inside, outwards); all.rate > 0)
          longest = std::max(longest, static_cast<double>(bytes) / all.rate);
  }
  for (const auto& [stream, seconds] : queues) longest = std::max(longest, seconds);
  return longest;
}

}  // namespace remat::tiers
