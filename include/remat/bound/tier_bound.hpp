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
  /// That tier, or every one.
  static tier_set of(tier_id t) {
    tier_set s;
    s.bits_ = t == any_tier ? ~std::uint64_t{0} : std::uint64_t{1} << t;
    return s;
  }

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

/// A problem with copies that every schedule of `p` is one of, as far as the time of the device and the memory of some
/// tiers go, among them the device, which are taken for one: what happens within them.
struct plain_part {
  problem p;
  std::vector<operation_id> operations;  ///< which they are
};

/// What else may be elsewhere without having been sent takes no room; operations on other tiers than the device take no time.
/// What has to leave the tiers is a target that ends on the host, and what may leave them in the end, as do all targets of cyclic
/// schedules, which nobody awaits, one that ends anywhere.
/// @param come sources that start elsewhere, on a tier that is known, do so on the host; otherwise nor do they take room
inline plain_part as_plain(const problem& p, tier_set inside, bool come, const places& of) {
  auto values = p.values();
  const auto& ops = p.operations();
  const auto needed = needed_operations(p);
  std::vector<bool> there(values.size(), false);  // at the begin, or made within
  for (value_id v = 0; v < values.size(); ++v) there[v] = p.is_source(v) && inside.has(values[v].starts);
  for (auto o : needed)
    for (auto v : ops[o].outputs) there[v] = inside.has(ops[o].on);
  std::vector<value_id> targets;
  for (value_id v = 0; v < values.size(); ++v) {
    const bool comes = come && p.is_source(v) && !there[v] && values[v].starts != any_tier;
    const bool leaves = std::any_of(of.wanted[v].begin(), of.wanted[v].end(), [&](tier_id t) { return !inside.has(t); });
    const bool stays = p.is_target(v) && p.next().empty() && inside.has(values[v].ends);
    if (!there[v] && !comes) values[v].bytes = 0;
    values[v].held = values[v].held && there[v] && values[v].bytes > 0;
    values[v].starts = comes ? tier_id(1) : device_tier;
    values[v].ends = device_tier;
    if (!there[v] || !(p.is_target(v) || leaves)) continue;
    targets.push_back(v);
    if (!stays) values[v].ends = leaves ? tier_id(1) : any_tier;
  }
  plain_part part;
  std::vector<operation> operations;
  for (auto o : needed) {
    if (!inside.has(ops[o].on)) continue;
    auto op = ops[o];
    if (op.on != device_tier) op.seconds = 0;
    op.on = device_tier;
    op.once = op.once || !op.overwrites.empty();
    std::erase_if(op.overwrites, [&](const auto& x) { return values[x.output].bytes != values[x.input].bytes; });
    targets.push_back(values.size());  // it runs, even if only others read what it makes
    op.outputs.push_back(values.size());
    values.push_back({.name = "done", .bytes = 0});
    part.operations.push_back(o);
    operations.push_back(std::move(op));
  }
  const auto up = links_across(p, inside, true), down = links_across(p, inside, false);
  part.p = {p.name(), std::move(values), std::move(operations), std::move(targets),
            copy_rates{up.rate, down.rate, std::min(up.latency, down.latency)}};
  return part;
}

/// What passes between the tiers `inside` and the others in every schedule.
/// @param plain what `as_plain` makes of both
/// @return only that
inline step_span passing(const problem& p, const problem& plain, tier_set inside, const places& of) {
  step_span all;
  const auto& link = *plain.copies();
  for (value_id v = 0; v < p.values().size(); ++v) {
    if (of.made[v] == any_tier) continue;
    const bool comes = !inside.has(of.made[v]);
    if (std::none_of(of.wanted[v].begin(), of.wanted[v].end(), [&](tier_id t) { return inside.has(t) == comes; })) continue;
    if (!comes && plain.values()[v].bytes > 0 && plain.values()[v].ends != 1) continue;  // it may have moved
    (comes ? all.to_device : all.to_host) +=
        link.latency + static_cast<double>(p.values()[v].bytes) / (comes ? link.to_device : link.to_host);
  }
  return all;
}

/// Do all copies between some tiers and the others come to one of them, or start there?
inline bool is_gate(const problem& p, tier_set inside, tier_id t) {
  return std::all_of(p.links().begin(), p.links().end(), [&](const copy_link& l) {
    return inside.has(l.from) == inside.has(l.to) || (inside.has(l.from) ? l.from : l.to) == t;
  });
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

/// Copies of values by the shortest way between any two tiers, s; 0 where there is none.
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

/// What has to happen between a source that one step leaves to the next and the target that takes its place, or between the
/// begin and a target.
class tier_path {
 public:
  explicit tier_path(const problem& p) : p_(p), needed_(needed_operations(p)), tiers_(p.tiers().size()), way_(p) {}

  /// @param from  a source, or `none`: all of them
  /// @param to    a target that operations produce
  /// @param there where it must be
  /// @return at least so long, s: the longest chain of operations and copies; and, of all operations on one tier in between,
  /// which
  ///         follow one another, the sum, the least before the first and the least after the last
  double seconds(value_id from, value_id to, tier_id there) const {
    std::vector<double> before(p_.values().size() * tiers_, never), after = before;
    const auto put = [&](value_id v, tier_id home, double then) {  // `v` is there then: when it can be where
      for (tier_id t = 0; t < tiers_; ++t) before[v * tiers_ + t] = home == any_tier ? then : then + way_(v, home, t);
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
    for (tier_id t = 0; t < tiers_; ++t) after[to * tiers_ + t] = there == any_tier ? 0 : way_(to, t, there);
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
          after[v * tiers_ + t] = std::max(after[v * tiers_ + t], op.seconds + end + way_(v, t, op.on));
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

  const problem& p_;
  const std::vector<operation_id> needed_;
  const std::size_t tiers_;
  const copy_ways way_;
};

/// What `tier_turn` knows of a problem, whichever tier it looks at.
struct step_parts {
  explicit step_parts(const problem& all)
      : p(all), needed(needed_operations(all)), of(find_places(all, needed)), way(all), narrow(all) {
    for (value_id v = 0; v < p.values().size(); ++v) stay.push_back(p.is_source(v) ? tier_set::of(of.made[v]) : tier_set());
    for (const auto& c : p.next()) stay[c.target] = std::exchange(stay[c.source], {});
    for (auto o : needed)
      for (const auto& x : p.operations()[o].overwrites) stay[x.input].add(p.operations()[o].on);  // it goes without a drop
  }

  const problem& p;
  const std::vector<operation_id> needed;
  const places of;
  const copy_ways way;
  mutable narrow_links narrow;
  std::vector<tier_set> stay;  ///< by value: where it may be that is not dropped in a step of a cyclic schedule
};

/// One step of a cyclic schedule, between the moment from which a tier has room for what comes to it in this step, or the device
/// begins it, whichever is later, and the one for the next. All that comes to the tier comes in between, and what the device
/// computes and the copies of what does not stay there or on the device end in between. On the device, whose clock that is,
/// everything begins in between. So it does in a schedule that is not cyclic, between its begin and its end, when targets are
/// where they must be.
class tier_turn {
 public:
  /// @param turn the tier; `any_tier`: the problem is not cyclic
  tier_turn(const step_parts& parts, tier_id turn)
      : p_(parts.p),
        turn_(turn),
        tiers_(p_.tiers().size()),
        needed_(parts.needed),
        of_(parts.of),
        way_(parts.way),
        stay_(parts.stay),
        narrow_(parts.narrow),
        before_(p_.values().size() * tiers_, never),
        after_(p_.values().size(), never),
        first_(p_.operations().size(), never),
        last_(first_) {
    look();
    go_back();
    go_on();
  }

  tier_id tier() const { return turn_; }
  /// At least so long, s.
  double seconds() {
    double longest = 0;
    for (auto o : needed_) longest = std::max(longest, first_[o] + p_.operations()[o].seconds + last_[o]);
    std::map<std::string, std::vector<piece>> queues;
    std::vector<double> made(first_.size(), never);
    for (auto& c : copies_) {
      auto& x = c.when;
      if (c.value_made && x.before != never) {
        auto& when = made[p_.producer(c.value)];
        if (when == never) when = before(p_.producer(c.value));
        raise(x.before, when + way_(c.value, of_.made[c.value], p_.links()[c.link].from));
      }
      if (x.before != never && x.after != never) queues[p_.links()[c.link].stream].push_back(x);
    }
    for (auto& [stream, pieces] : queues) longest = std::max(longest, one_by_one(pieces));
    for (tier_id t = 0; t < tiers_; ++t) {
      std::vector<piece> runs;
      for (auto o : needed_)
        if (p_.operations()[o].on == t && first_[o] != never && last_[o] != never)
          runs.push_back({first_[o], p_.operations()[o].seconds, last_[o]});
      longest = std::max(longest, one_by_one(runs));
    }
    return longest;
  }

  /// What is known of the cut of a group of tiers in this step.
  void look_at(const plain_part& part, tier_set inside, step_span& x) const {
    const auto& q = part.p;
    const bool cyclic = turn_ != any_tier, gate = cyclic && is_gate(p_, inside, turn_);
    for (operation_id o = 0; o < part.operations.size(); ++o) {
      x.first.push_back(first_[part.operations[o]]);
      x.moments.push_back(x.first[o] >= 0 && p_.operations()[part.operations[o]].on == device_tier);
    }
    const auto in_time = [&](value_id v) {
      return all_begins() || (gate && !(q.is_source(v) && p_.values()[v].starts == turn_));
    };
    for (value_id v = 0; v < q.values().size(); ++v) {
      const bool real = v < p_.values().size();
      const bool dropped = real && gate && !stay_[v].has(turn_);
      x.goes.push_back(real && in_time(v));
      x.leaves.push_back(
          real && (cyclic ? dropped : p_.is_target(v) && p_.values()[v].ends != any_tier && !inside.has(p_.values()[v].ends)));
      const auto readers = q.consumers(v);
      x.comes.push_back(real && (dropped || std::all_of(readers.begin(), readers.end(), [&](operation_id o) {
                                   const auto reader = part.operations[o];
                                   return p_.operations()[reader].on == device_tier ||
                                          (q.operations()[o].once && last_[reader] != never);
                                 })));
    }
  }

 private:
  static constexpr double never = -std::numeric_limits<double>::infinity();
  struct piece {
    double before, seconds, after;
  };
  struct copy {
    value_id value;
    std::size_t link;
    bool value_made;
    piece when;
  };

  /// Does everything begin after the first moment?
  bool all_begins() const { return turn_ == device_tier || turn_ == any_tier; }
  /// Does that copy end before the second moment?
  bool leaves(const copy& c) {
    const auto from = p_.links()[c.link].from;
    if (turn_ != any_tier) return (from == turn_ || from == device_tier) && !stay_[c.value].has(from);
    const auto ends = p_.values()[c.value].ends;
    return p_.is_target(c.value) && ends != any_tier && leads_over(c, ends);
  }
  /// What is made by an operation on that tier: is it there before the second moment?
  bool leaves(value_id v, tier_id on) const {
    if (on == device_tier) return true;
    if (turn_ != any_tier) return on == turn_ && !stay_[v].has(on);
    return p_.is_target(v) && (p_.values()[v].ends == on || p_.values()[v].ends == any_tier);
  }
  double& at(std::vector<double>& times, value_id v, tier_id t) const { return times[v * tiers_ + t]; }

  /// The copies that there are in any case.
  void look() {
    for (value_id v = 0; v < of_.made.size(); ++v) {
      copies_of_.push_back(copies_.size());
      if (of_.made[v] == any_tier) continue;
      std::vector<std::size_t> links;
      for (auto t : of_.wanted[v])
        for (auto l : narrow_.between(of_.made[v], t))
          if (std::find(links.begin(), links.end(), l) == links.end()) links.push_back(l);
      for (auto l : links) {
        const auto& link = p_.links()[l];
        copies_.push_back(
            {v, l, !p_.is_source(v), {never, link.latency + static_cast<double>(p_.values()[v].bytes) / link.rate, never}});
      }
    }
    copies_of_.push_back(copies_.size());
  }
  /// When each value can be where, and each operation begin, after the first moment.
  void go_back() {
    for (value_id v = 0; v < of_.made.size(); ++v)
      for (tier_id t = 0; t < tiers_ && p_.is_source(v) && all_begins(); ++t)
        at(before_, v, t) = of_.made[v] == any_tier ? 0 : way_(v, of_.made[v], t);
    for (auto& c : copies_) {
      const auto to = p_.links()[c.link].to;
      if (c.value_made || to != turn_ || all_begins()) continue;
      c.when.before = 0;
      for (tier_id t = 0; t < tiers_; ++t)
        if (leads_over(c, t)) at(before_, c.value, t) = c.when.seconds + way_(c.value, turn_, t);
    }
    for (auto o : needed_) {
      const auto& op = p_.operations()[o];
      if (all_begins() || op.on == turn_) first_[o] = 0;
      for (auto v : op.inputs) first_[o] = std::max(first_[o], at(before_, v, op.on));
      for (auto v : op.outputs)
        for (tier_id t = 0; t < tiers_; ++t) at(before_, v, t) = first_[o] + op.seconds + way_(v, op.on, t);
    }
    for (auto& c : copies_) c.when.before = std::max(c.when.before, at(before_, c.value, p_.links()[c.link].from));
  }
  /// How long it takes from then on to the second moment.
  void go_on() {
    for (auto& c : copies_) {
      if (!leaves(c)) continue;
      c.when.after = 0;
      if (c.value_made) raise(after_[c.value], way_(c.value, of_.made[c.value], p_.links()[c.link].from) + c.when.seconds);
    }
    for (auto o = needed_.rbegin(); o != needed_.rend(); ++o) {
      const auto& op = p_.operations()[*o];
      auto& last = last_[*o];
      for (auto v : op.outputs) {
        if (leaves(v, op.on)) raise(last, 0);
        raise(last, after_[v]);
      }
      for (auto v : op.inputs)
        if (!p_.is_source(v)) raise(after_[v], op.seconds + last + way_(v, of_.made[v], op.on));
    }
    for (auto& c : copies_) {
      const auto to = p_.links()[c.link].to;
      for (auto o : p_.consumers(c.value)) {
        const auto& op = p_.operations()[o];
        if (leads_over(c, op.on)) raise(c.when.after, op.seconds + last_[o] + way_(c.value, to, op.on));
      }
      for (auto i = copies_of_[c.value]; i < copies_of_[c.value + 1]; ++i)
        if (const auto from = p_.links()[copies_[i].link].from; leaves(copies_[i]) && leads_over(c, from))
          raise(c.when.after, way_(c.value, to, from) + copies_[i].when.seconds);
    }
  }
  /// Does the value of `c` come to a tier only by that copy?
  bool leads_over(const copy& c, tier_id to) {
    const auto& links = narrow_.between(of_.made[c.value], to);
    return std::find(links.begin(), links.end(), c.link) != links.end();
  }
  static void raise(double& x, double to) { x = std::max(x, to); }
  /// When the first run of an operation ends: after all copies of sources, one after another, that it and those before it read,
  /// and after all that those before it on one tier take.
  double before(operation_id last) {
    std::vector<double> until(p_.operations().size(), never);  // from its end to the begin of the last one
    std::map<value_id, std::vector<operation_id>> read;
    std::vector<std::vector<piece>> runs(tiers_);
    until[last] = -p_.operations()[last].seconds;
    for (auto o = std::upper_bound(needed_.begin(), needed_.end(), last); o != needed_.begin();) {
      const auto& op = p_.operations()[*--o];
      const double then = until[*o];
      if (then == never) continue;
      if (*o != last && first_[*o] != never) runs[op.on].push_back({first_[*o], op.seconds, then});
      for (auto v : op.inputs)
        if (p_.is_source(v))
          read[v].push_back(*o);
        else
          raise(until[p_.producer(v)], way_(v, of_.made[v], op.on) + op.seconds + then);
    }
    std::map<std::string, std::vector<piece>> queues;
    for (const auto& [v, readers] : read)
      for (auto i = copies_of_[v]; i < copies_of_[v + 1]; ++i) {
        const auto& c = copies_[i];
        piece x{c.when.before, c.when.seconds, never};
        for (auto o : readers)
          if (const auto& op = p_.operations()[o]; leads_over(c, op.on))
            raise(x.after, way_(v, p_.links()[c.link].to, op.on) + op.seconds + until[o]);
        if (x.before != never && x.after != never) queues[p_.links()[c.link].stream].push_back(x);
      }
    double longest = first_[last];
    for (auto& [stream, pieces] : queues) longest = std::max(longest, one_by_one(pieces));
    for (auto& pieces : runs) longest = std::max(longest, one_by_one(pieces));
    return longest + p_.operations()[last].seconds;
  }
  /// Of pieces that follow one another in any order, those that begin late and those that leave much to do in turn.
  static double one_by_one(std::vector<piece>& pieces) {
    double longest = 0;
    for (const auto key : {&piece::before, &piece::after}) {
      std::sort(pieces.begin(), pieces.end(), [&](const piece& a, const piece& b) { return a.*key > b.*key; });
      piece all{std::numeric_limits<double>::infinity(), 0, std::numeric_limits<double>::infinity()};
      for (const auto& x : pieces) {
        all = {std::min(all.before, x.before), all.seconds + x.seconds, std::min(all.after, x.after)};
        longest = std::max(longest, all.before + all.seconds + all.after);
      }
    }
    return longest;
  }

  const problem& p_;
  const tier_id turn_;
  const std::size_t tiers_;
  const std::vector<operation_id>& needed_;
  const places& of_;
  const copy_ways& way_;
  const std::vector<tier_set>& stay_;
  narrow_links& narrow_;
  std::vector<double> before_;          // by value and tier
  std::vector<double> after_;           // by value, from where and when it is made
  std::vector<double> first_, last_;    // by operation: before and after it
  std::vector<copy> copies_;            // by value
  std::vector<std::size_t> copies_of_;  // where those of each value begin, and end
};

/// The tiers whose turns `tier_turn` looks at.
inline std::vector<tier_id> turns_of(const problem& p) {
  if (p.next().empty()) return {any_tier};
  std::vector<tier_id> all;
  for (tier_id t = 0; t < p.tiers().size(); ++t) all.push_back(t);
  return all;
}

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

/// Where steps repeat, what comes to a tier in one step comes after what left it in the step before. So the tier empties between
/// steps of all that does not stay there, and what leads from what comes to it to what leaves it must fit into one period: the
/// longest path, and each queue with the least before its first and after its last. The same of all that happens, where steps do
/// not repeat.
/// @param p a problem that is not plain
/// Complexity: O(tiers (values + edges) values).
inline double turn_bound(const problem& p) {
  const detail::step_parts parts(p);
  double longest = 0;
  for (auto t : detail::turns_of(p)) longest = std::max(longest, detail::tier_turn(parts, t).seconds());
  return longest;
}

/// A lower bound on the time, of cyclic schedules the period, of every schedule of a problem on several tiers: `queue_bound`,
/// `path_bound`, `turn_bound` and, for the device, for the device and the next tier and so on up to the first without limit, each
/// taken for one memory, `copy_bound` of what happens there, with what starts or ends beyond, passes in any case, and is waited
/// for at the begin; in cyclic schedules between the moments of `turn_bound`.
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
  const detail::step_parts parts(p);
  std::vector<detail::tier_turn> turns;
  for (auto t : detail::turns_of(p)) best = std::max(best, turns.emplace_back(parts, t).seconds());
  for (const auto& [inside, most] : detail::tier_prefixes(p, budget))
    for (const bool come : {false, true}) {  // what comes tells more, but of other moments
      const auto part = detail::as_plain(p, inside, come, parts.of);
      if (bounds_without_search(part.p).budget > most) continue;
      for (const auto& turn : turns) {
        if (!p.next().empty() && turn.tier() != device_tier && !detail::is_gate(p, inside, turn.tier())) continue;
        auto span = detail::passing(p, part.p, inside, parts.of);
        turn.look_at(part, inside, span);
        best = std::max(best, detail::most_of_moments(part.p, most, &span, best, {}, stop));
      }
    }
  return best;
}

}  // namespace remat::bound
