// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem on several tiers: how long each queue is busy. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/tiers/tier_places.hpp>
#include <remat/tiers/tiers_as_one.hpp>

namespace remat::tiers::detail {

/// A lower bound on the time of every schedule, for cyclic schedules on the period: the work of the queue that is busy longest.
/// The computations on the device do not count.
/// - A stream copies each value that starts or is made on one tier and is read or ends on another. Only links that are on every
///   path between the two tiers count.
/// - A tier runs the operations on that tier.
/// - All links into the first tiers of the chain together copy sources that may start anywhere and are read on these tiers, as
///   far as the sources do not fit there.
/// @param facts  of a problem with at least two tiers
/// @param budget bytes of the device
/// @return s
/// Complexity: O(values + edges), times the number of tiers.
inline double queue_bound(tier_facts& facts, bytes_t budget) {
  const auto& p = facts.p;
  const auto& ops = p.operations();
  const auto& values = p.values();
  const auto links = p.links();
  const auto& [places, wanted] = facts.places;
  std::vector<double> computed(p.tiers().size(), 0);
  for (auto o : facts.needed) computed[ops[o].on] += ops[o].seconds;
  std::map<std::string, double> queues;
  for (value_id v = 0; v < values.size(); ++v)
    for (auto l : facts.links_passed(v))
      queues[links[l].stream] += links[l].latency + static_cast<double>(values[v].bytes) / links[l].rate;
  double longest = *std::max_element(computed.begin() + 1, computed.end());
  // Sources that may start anywhere: the bytes that do not fit on the tiers of a group that read them must enter the group. In a
  // cyclic problem, the bytes of their replacements that do not fit must leave it.
  for (const auto& group : tier_prefixes(p, budget)) {
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
        if (const auto all = links_across(p, inside, outwards); all.rate > 0)
          longest = std::max(longest, static_cast<double>(bytes) / all.rate);
  }
  for (const auto& [stream, seconds] : queues) longest = std::max(longest, seconds);
  return longest;
}

}  // namespace remat::tiers::detail
