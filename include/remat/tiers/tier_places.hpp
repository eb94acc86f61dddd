// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where values are and which ways lead there, of problems on several tiers: parts of the bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat::tiers {

namespace detail {

/// A set of tiers.
class tier_set {
 public:
  tier_set() = default;
  explicit tier_set(std::span<const tier_id> tiers) {
    for (auto t : tiers) add(t);
  }
  void add(tier_id t) { bits_ |= std::uint64_t{1} << t; }
  bool has(tier_id t) const { return t < max_tiers && (bits_ >> t & 1) != 0; }
  /// That tier, or every one.
  static tier_set of(tier_id t) {
    tier_set s;
    s.bits_ = t == any_tier ? ~std::uint64_t{0} : std::uint64_t{1} << t;
    return s;
  }

 private:
  std::uint64_t bits_ = 0;
};

/// Where each source starts, as far as the problem says; `any_tier` otherwise, and for other values where they are made.
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

/// The links that every way from one tier to another leads over.
/// Complexity: O(links^2) for each pair of tiers that is asked for, once.
class narrow_links {
 public:
  explicit narrow_links(const problem& p) : p_(p) {}

  /// Indices into `p.links()`; none if there is no way.
  const std::vector<std::size_t>& between(tier_id from, tier_id to) {
    const auto [at, added] = known_.try_emplace({from, to});
    if (added && reaches(from, to, p_.links().size()))
      for (std::size_t l = 0; l < p_.links().size(); ++l)
        if (!reaches(from, to, l)) at->second.push_back(l);
    return at->second;
  }

 private:
  bool reaches(tier_id from, tier_id to, std::size_t without) const {
    std::vector<tier_id> found = {from};
    tier_set seen{found};
    for (std::size_t i = 0; i < found.size() && !seen.has(to); ++i)
      for (std::size_t l = 0; l < p_.links().size(); ++l) {
        const auto& link = p_.links()[l];
        if (l == without || link.from != found[i] || seen.has(link.to)) continue;
        seen.add(link.to);
        found.push_back(link.to);
      }
    return seen.has(to);
  }

  const problem& p_;
  std::map<std::pair<tier_id, tier_id>, std::vector<std::size_t>> known_;
};

/// Where values are made, and where they have to be besides.
struct places {
  std::vector<tier_id> made;                 ///< `first_places`
  std::vector<std::vector<tier_id>> wanted;  ///< of each value that is there in any case, where it is read or ends
};

/// Complexity: O(values + edges).
inline places find_places(const problem& p, const std::vector<operation_id>& needed) {
  const auto& ops = p.operations();
  places all{first_places(p), std::vector<std::vector<tier_id>>(p.values().size())};
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

/// Copies of values by the shortest way between any two tiers, s; 0 where there is none.
/// Complexity: O(values tiers^3).
class copy_ways {
 public:
  explicit copy_ways(const problem& p) : tiers_(p.tiers().size()) {
    for (const auto& x : p.values()) add(p, static_cast<double>(x.bytes));
  }
  double operator()(value_id v, tier_id from, tier_id to) const { return ways_[(v * tiers_ + from) * tiers_ + to]; }

 private:
  void add(const problem& p, double bytes) {
    constexpr double never = std::numeric_limits<double>::infinity();
    const auto first = ways_.size();
    ways_.resize(first + tiers_ * tiers_, never);
    auto* const ways = &ways_[first];
    for (std::size_t t = 0; t < tiers_; ++t) ways[t * tiers_ + t] = 0;
    for (const auto& l : p.links()) ways[l.from * tiers_ + l.to] = l.latency + bytes / l.rate;
    for (std::size_t over = 0; over < tiers_ && tiers_ > 2; ++over)
      for (std::size_t a = 0; a < tiers_; ++a)
        for (std::size_t b = 0; b < tiers_; ++b)
          ways[a * tiers_ + b] = std::min(ways[a * tiers_ + b], ways[a * tiers_ + over] + ways[over * tiers_ + b]);
    for (auto x = ways_.begin() + static_cast<std::ptrdiff_t>(first); x != ways_.end(); ++x)
      if (*x == never) *x = 0;
  }

  std::size_t tiers_;
  std::vector<double> ways_;
};

}  // namespace detail

}  // namespace remat::tiers
