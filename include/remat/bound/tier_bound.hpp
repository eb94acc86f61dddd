// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem on several tiers. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/copy_bound.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/order/residence.hpp>

namespace remat::bound {

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

 private:
  std::uint64_t bits_ = 0;
};

/// The links from one set of tiers to all others, or the other way round, as one: it is at least as fast as they are together.
/// @return of no rate if there are none
inline copy_link links_across(const problem& p, tier_set inside, bool out) {
  copy_link all{device_tier, device_tier};
  double least = std::numeric_limits<double>::infinity();
  for (const auto& l : p.links()) {
    if (inside.has(out ? l.to : l.from) || !inside.has(out ? l.from : l.to)) continue;
    all.rate += l.rate;
    least = std::min(least, l.latency * l.rate);
  }
  all.rate = std::min(all.rate, std::numeric_limits<double>::max());
  all.latency = all.rate > 0 && std::isfinite(least) ? least / all.rate : 0;
  return all;
}

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

/// A problem with copies that every schedule of `p` is one of, as far as the time of the device and the memory of some
/// tiers go, among them the device, which are taken for one, but for sources that start elsewhere, on the host: what else may be
/// elsewhere without having been sent, outputs in the places of inputs, and targets of cyclic schedules, which nobody awaits,
/// take no room; nothing is computed but on the device.
/// @param come false: nor do those sources, and it is a plain problem
inline problem as_plain(const problem& p, tier_set inside, bool come) {
  auto values = p.values();
  const auto& ops = p.operations();
  for (value_id v = 0; v < values.size(); ++v) {
    const bool away = p.is_source(v) && !inside.has(values[v].starts), comes = come && away && values[v].starts != any_tier;
    if (p.is_source(v) ? away && !comes : ops[p.producer(v)].on != device_tier) values[v].bytes = 0;
    values[v].held = values[v].held && !away;
    values[v].starts = comes ? tier_id(1) : device_tier;
    values[v].ends = device_tier;
  }
  for (auto v : p.targets())
    if (!p.next().empty()) values[v].bytes = 0;
  std::vector<operation> operations;
  std::vector<value_id> targets;
  std::vector<bool> made(values.size(), false);
  for (auto v : p.targets())
    if (inside.has(p.values()[v].ends)) targets.push_back(v);
  for (auto o : needed_operations(p)) {
    if (ops[o].on != device_tier) continue;
    auto op = ops[o];
    for (auto v : op.outputs) made[v] = true;
    for (const auto& x : op.overwrites) values[x.output].bytes = 0;
    op.once = op.once || !op.overwrites.empty();
    op.overwrites.clear();
    targets.push_back(values.size());  // it runs, even if only others read what it makes
    op.outputs.push_back(values.size());
    values.push_back({.name = "done", .bytes = 0});
    operations.push_back(std::move(op));
  }
  for (value_id v = 0; v < made.size(); ++v) {
    if (!p.is_source(v) && !made[v]) values[v].bytes = 0;
    values[v].held = values[v].held && values[v].bytes > 0;
  }
  const auto up = links_across(p, inside, true), down = links_across(p, inside, false);
  return {p.name(), std::move(values), std::move(operations), std::move(targets),
          copy_rates{up.rate, down.rate, std::min(up.latency, down.latency)}};
}

/// The links that every way from one tier to another leads over.
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

/// What passes between the tiers `inside` and the others in every schedule.
/// @param plain what `as_plain` makes of both
inline must_pass passing(const problem& p, const problem& plain, tier_set inside, const places& of) {
  must_pass all;
  const auto& link = *plain.copies();
  for (value_id v = 0; v < p.values().size(); ++v) {
    if (of.made[v] == any_tier) continue;
    const bool comes = !inside.has(of.made[v]);
    if (std::none_of(of.wanted[v].begin(), of.wanted[v].end(), [&](tier_id t) { return inside.has(t) == comes; })) continue;
    if (!comes && (!plain.consumers(v).empty() || plain.is_target(v))) continue;  // it may have moved
    (comes ? all.to_device : all.to_host) +=
        link.latency + static_cast<double>(p.values()[v].bytes) / (comes ? link.to_device : link.to_host);
  }
  return all;
}

/// The device and the tiers next to it, up to the first without limit or the last but one.
struct tier_prefix {
  tier_set tiers;
  bytes_t budget;  // of all of them
};

inline std::vector<tier_prefix> tier_prefixes(const problem& p, bytes_t budget) {
  const auto chain = order::tier_chain(p);
  std::vector<tier_prefix> all;
  tier_prefix now{tier_set{}, budget};
  for (std::size_t i = 0; i + 1 < chain.size(); ++i) {
    if (i > 0 && !p.tiers()[chain[i]].budget) break;
    if (i > 0) now.budget += *p.tiers()[chain[i]].budget;
    now.tiers.add(chain[i]);
    all.push_back(now);
  }
  return all;
}

}  // namespace detail

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

namespace detail {

/// What has to happen between a source that one step leaves to the next and the target that takes its place, or between the
/// begin and a target.
class tier_path {
 public:
  explicit tier_path(const problem& p) : p_(p), needed_(needed_operations(p)), tiers_(p.tiers().size()) {
    for (const auto& x : p.values()) add_ways(static_cast<double>(x.bytes));
  }

  /// @param from  a source, or `none`: all of them
  /// @param to    a target that operations produce
  /// @param there where it must be
  /// @return at least so long, s: the longest chain of operations and copies; and, of all operations on one tier in between,
  /// which
  ///         follow one another, the sum, the least before the first and the least after the last
  double seconds(value_id from, value_id to, tier_id there) const {
    std::vector<double> before(p_.values().size() * tiers_, never), after = before;
    const auto put = [&](value_id v, tier_id home, double then) {  // `v` is there then: when it can be where
      for (tier_id t = 0; t < tiers_; ++t) before[v * tiers_ + t] = home == any_tier ? then : then + way(v, home, t);
    };
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && (from == none || v == from)) put(v, p_.values()[v].starts, 0);
    const auto first = [&](const operation& op) {
      double begin = from == none ? 0 : never;
      for (auto v : op.inputs) begin = std::max(begin, before[v * tiers_ + op.on]);
      return begin;
    };
    for (auto o : needed_) {
      const auto& op = p_.operations()[o];
      for (auto v : op.outputs) put(v, op.on, first(op) + op.seconds);
    }
    for (tier_id t = 0; t < tiers_; ++t) after[to * tiers_ + t] = there == any_tier ? 0 : way(to, t, there);
    struct run {
      double sum = 0, head = -never, tail = -never;
    };
    std::vector<run> runs(tiers_);
    for (auto o = needed_.rbegin(); o != needed_.rend(); ++o) {
      const auto& op = p_.operations()[*o];
      double end = never;
      for (auto v : op.outputs) end = std::max(end, after[v * tiers_ + op.on]);
      if (end == never) continue;
      for (auto v : op.inputs)
        for (tier_id t = 0; t < tiers_; ++t)
          after[v * tiers_ + t] = std::max(after[v * tiers_ + t], op.seconds + end + way(v, t, op.on));
      if (first(op) == never) continue;
      auto& r = runs[op.on];
      r.sum += op.seconds;
      r.head = std::min(r.head, first(op));
      r.tail = std::min(r.tail, end);
    }
    const auto* made = &before[to * tiers_];
    double longest = std::max(0.0, there == any_tier ? *std::min_element(made, made + tiers_) : made[there]);
    for (const auto& r : runs)
      if (r.sum > 0) longest = std::max(longest, r.head + r.sum + r.tail);
    return longest;
  }

 private:
  static constexpr double never = -std::numeric_limits<double>::infinity();

  /// Copies of so many bytes: the shortest way between any two tiers, 0 where there is none.
  void add_ways(double bytes) {
    const auto first = ways_.size();
    ways_.resize(first + tiers_ * tiers_, -never);
    auto* const ways = &ways_[first];
    for (std::size_t t = 0; t < tiers_; ++t) ways[t * tiers_ + t] = 0;
    for (const auto& l : p_.links()) ways[l.from * tiers_ + l.to] = l.latency + bytes / l.rate;
    for (std::size_t over = 0; over < tiers_ && tiers_ > 2; ++over)
      for (std::size_t a = 0; a < tiers_; ++a)
        for (std::size_t b = 0; b < tiers_; ++b)
          ways[a * tiers_ + b] = std::min(ways[a * tiers_ + b], ways[a * tiers_ + over] + ways[over * tiers_ + b]);
    for (auto x = ways_.begin() + static_cast<std::ptrdiff_t>(first); x != ways_.end(); ++x)
      if (*x == -never) *x = 0;
  }
  double way(value_id v, tier_id from, tier_id to) const { return ways_[(v * tiers_ + from) * tiers_ + to]; }

  const problem& p_;
  const std::vector<operation_id> needed_;
  const std::size_t tiers_;
  std::vector<double> ways_;  // s, by value, from and to
};

}  // namespace detail

/// The longest of what has to happen one after another: before a target is where it must end; or, where steps repeat, between a
/// source and the target that takes its place.
/// @param p    a problem that is not plain
/// @param most ends looked at, those that are made last
/// Complexity: O((most + tiers^2) tiers (values + edges)).
inline double path_bound(const problem& p, std::size_t most = 64) {
  const detail::tier_path of(p);
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
  for (const auto& x : paths) longest = std::max(longest, of.seconds(x.from, x.to, x.there));
  return longest;
}

/// A lower bound on the time, of cyclic schedules the period, of every schedule of a problem on several tiers: `queue_bound`,
/// `path_bound` and, for the device, for the device and the next tier and so on up to the first without limit, each taken for one
/// memory, `copy_bound` of what the device computes, with what starts beyond, is read there, and passes in any case.
/// @param p      a problem whose device is linked both ways with another tier
/// @param budget bytes, of the device
/// @param stop   polled between cuts; true returns what is proven by then
/// @return no schedule within the budget is faster, s
/// @throws bad_option if no tier is linked both ways with the device
/// Complexity: that of `copy_bound`, for each of them.
/// @code
/// std::cout << "no step takes less than " << remat::bound::tier_bound(p, budget) << " s\n";
/// @endcode
inline double tier_bound(const problem& p, bytes_t budget, const std::function<bool()>& stop = {}) {
  if (order::tier_chain(p).size() < 2) throw bad_option("tier_bound: no tier is linked both ways with the device");
  double best = std::max({queue_bound(p, budget), path_bound(p), bounds_without_search(p).seconds});
  const auto of = detail::find_places(p, needed_operations(p));
  for (const auto& [inside, most] : detail::tier_prefixes(p, budget))
    for (const bool come : {false, true}) {  // what comes tells more, but of other moments
      const auto plain = detail::as_plain(p, inside, come);
      if (bounds_without_search(plain).budget > most) continue;
      best = std::max(best, detail::most_of_moments(plain, most, detail::passing(p, plain, inside, of), {}, stop));
    }
  return best;
}

}  // namespace remat::bound
