// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where values are made and needed, and the paths between these tiers: parts of the lower bounds for several tiers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::tiers {

namespace detail {

/// Per value: the tier where it is made or starts. `any_tier` for a source if the problem leaves open where it starts.
inline std::vector<tier_id> first_places(const problem& p) {
  std::vector<tier_id> places;
  std::vector<bool> replaced(p.values().size(), false);
  for (value_id v = 0; v < p.values().size(); ++v)
    places.push_back(p.is_source(v) ? p.values()[v].starts : p.operations()[p.producer(v)].on);
  for (const auto& [target, source] : p.next()) {
    replaced[source] = true;
    if (places[source] == any_tier) places[source] = p.values()[target].ends;
  }
  for (auto v : p.targets())
    if (!p.next().empty() && places[v] == any_tier && !replaced[v]) places[v] = p.values()[v].ends;
  return places;
}

/// The links that are on every path from one tier to another.
/// Complexity: O(links^2), once for each pair of tiers that is asked for.
class bridge_links {
 public:
  explicit bridge_links(const problem& p) : p_(p) {}

  /// Indices into `p.links()`; empty if there is no path.
  const std::vector<std::size_t>& between(tier_id from, tier_id to) {
    const auto [entry, added] = known_.try_emplace({from, to});
    if (added && reaches(from, to, p_.links().size()))
      for (std::size_t l = 0; l < p_.links().size(); ++l)
        if (!reaches(from, to, l)) entry->second.push_back(l);
    return entry->second;
  }

 private:
  bool reaches(tier_id from, tier_id to, std::size_t without) const {
    std::vector<tier_id> reached = {from};
    tier_set seen(from);
    for (std::size_t i = 0; i < reached.size() && !seen.has(to); ++i)
      for (std::size_t l = 0; l < p_.links().size(); ++l) {
        const auto& link = p_.links()[l];
        if (l == without || link.from != reached[i] || seen.has(link.to)) continue;
        seen.add(link.to);
        reached.push_back(link.to);
      }
    return seen.has(to);
  }

  const problem& p_;
  std::map<std::pair<tier_id, tier_id>, std::vector<std::size_t>> known_;
};

/// The tiers where values are made, and the tiers where they are needed.
struct value_places {
  std::vector<tier_id> made;  ///< result of `first_places`
  /// Per value: the tiers where it is read or ends. Empty if no target needs the operation that makes it.
  std::vector<std::vector<tier_id>> wanted;
};

/// Finds the `value_places` of all values.
/// @param needed the operations that some target needs, ascending
/// Complexity: O(values + edges).
inline value_places find_places(const problem& p, const std::vector<operation_id>& needed) {
  const auto& ops = p.operations();
  value_places all{first_places(p), std::vector<std::vector<tier_id>>(p.values().size())};
  const auto want = [&](value_id v, tier_id t) {
    auto& list = all.wanted[v];
    if (t != any_tier && std::find(list.begin(), list.end(), t) == list.end()) list.push_back(t);
  };
  for (auto o : needed)
    for (auto v : ops[o].inputs) want(v, ops[o].on);
  for (auto v : p.targets()) want(v, p.values()[v].ends);
  for (const auto& c : p.next()) want(c.target, all.made[c.source]);
  for (value_id v = 0; v < p.values().size(); ++v)
    if (!p.is_source(v) && !std::binary_search(needed.begin(), needed.end(), p.producer(v))) all.wanted[v].clear();
  return all;
}

/// The time to copy a value from one tier to another on the fastest path, s; 0 if there is no path.
/// Complexity: O(values tiers^3).
class copy_distances {
 public:
  explicit copy_distances(const problem& p) : tiers_(p.tiers().size()) {
    for (const auto& x : p.values()) add(p, static_cast<double>(x.bytes));
  }
  double operator()(value_id v, tier_id from, tier_id to) const { return seconds_[(v * tiers_ + from) * tiers_ + to]; }

 private:
  void add(const problem& p, double bytes) {
    constexpr double never = std::numeric_limits<double>::infinity();
    const auto first = seconds_.size();
    seconds_.resize(first + tiers_ * tiers_, never);
    auto* const seconds = &seconds_[first];
    for (std::size_t t = 0; t < tiers_; ++t) seconds[t * tiers_ + t] = 0;
    for (const auto& l : p.links()) seconds[l.from * tiers_ + l.to] = l.latency + bytes / l.rate;
    for (std::size_t via = 0; via < tiers_ && tiers_ > 2; ++via)
      for (std::size_t a = 0; a < tiers_; ++a)
        for (std::size_t b = 0; b < tiers_; ++b)
          seconds[a * tiers_ + b] = std::min(seconds[a * tiers_ + b], seconds[a * tiers_ + via] + seconds[via * tiers_ + b]);
    for (auto x = seconds_.begin() + static_cast<std::ptrdiff_t>(first); x != seconds_.end(); ++x)
      if (*x == never) *x = 0;
  }

  std::size_t tiers_;
  std::vector<double> seconds_;
};

/// The facts about a problem that several bounds need.
struct tier_facts {
  explicit tier_facts(const problem& all)
      : p(all), needed(needed_operations(all)), places(find_places(all, needed)), distance(all), bridges(all) {}

  /// Indices into `p.links()`: the links that copy `v` in every schedule.
  std::vector<std::size_t> links_passed(value_id v) {
    std::vector<std::size_t> links;
    if (places.made[v] == any_tier) return links;
    for (auto t : places.wanted[v])
      for (auto l : bridges.between(places.made[v], t))
        if (std::find(links.begin(), links.end(), l) == links.end()) links.push_back(l);
    return links;
  }

  const problem& p;
  const std::vector<operation_id> needed;
  const value_places places;
  const copy_distances distance;
  bridge_links bridges;
};

}  // namespace detail

}  // namespace remat::tiers
