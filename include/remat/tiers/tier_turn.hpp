// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem on several tiers: the work within a turn of a tier. Needs
/// Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/retention_cut.hpp>
#include <remat/core/problem.hpp>
#include <remat/tiers/tier_places.hpp>
#include <remat/tiers/tiers_as_one.hpp>

namespace remat::tiers {

namespace detail {

/// By value: the tiers on which a cyclic schedule need not drop it within a step.
inline std::vector<tier_set> tiers_to_stay_on(const tier_facts& facts) {
  const auto& p = facts.p;
  std::vector<tier_set> stay;
  for (value_id v = 0; v < p.values().size(); ++v) stay.push_back(p.is_source(v) ? tier_set(facts.where.made[v]) : tier_set());
  for (const auto& c : p.next()) stay[c.target] = std::exchange(stay[c.source], {});
  for (auto o : facts.needed)
    for (const auto& x : p.operations()[o].overwrites) stay[x.input].add(p.operations()[o].on);  // it goes without a drop
  return stay;
}

/// One turn of a tier: the time from one step of a cyclic schedule to the next, as this tier sees it. A turn begins when the tier
/// has room for the values that come to it in this step, but not before the device begins the step.
///
/// All values that come to the tier in this step arrive within the turn. Computations of the device end within it, and so do
/// copies of values that stay neither on the tier nor on the device. For the device itself, all of its work also begins within
/// the turn. A schedule that is not cyclic is one turn, from its begin until all targets are in place.
///
/// In a cyclic schedule, values of one step come to a tier after values of the step before have left it. So between two steps
/// only the values that stay are on the tier. All work from the values that come to those that leave must fit into one period.
/// This gives two bounds: the longest path, and for each queue the time of its work, the least time before, and the least time
/// after it. In a schedule that is not cyclic, the same holds for all work.
class tier_turn {
 public:
  /// @param facts must outlive this
  /// @param stay  `tiers_to_stay_on(facts)`; must outlive this
  /// @param turn  the tier; `any_tier`: the problem is not cyclic
  /// Complexity: O(tiers (values + edges)).
  tier_turn(tier_facts& facts, const std::vector<tier_set>& stay, tier_id turn)
      : facts_(facts),
        p_(facts.p),
        turn_(turn),
        tiers_(p_.tiers().size()),
        needed_(facts.needed),
        where_(facts.where),
        way_(facts.way),
        stay_(stay),
        before_(p_.values().size() * tiers_, never),
        after_(p_.values().size(), never),
        first_(p_.operations().size(), never),
        last_(first_) {
    look();
    go_back();
    go_on();
  }

  tier_id tier() const { return turn_; }
  /// A lower bound on the length of the turn, s.
  /// @param stop polled for each copy; true returns what is proven by then
  /// Complexity: O(copies (values + edges) log(operations)).
  double seconds(const std::function<bool()>& stop = {}) {
    double longest = 0;
    for (auto o : needed_) longest = std::max(longest, first_[o] + p_.operations()[o].seconds + last_[o]);
    std::map<std::string, std::vector<piece>> queues;
    std::vector<double> made(first_.size(), never);
    for (auto& c : copies_) {
      auto& x = c.when;
      if (c.value_made && x.before != never && !(stop && stop())) {
        auto& when = made[p_.producer(c.value)];
        if (when == never) when = before(p_.producer(c.value));
        raise(x.before, when + way_(c.value, where_.made[c.value], p_.links()[c.link].from));
      }
      if (x.before != never && x.after != never) queues[p_.links()[c.link].stream].push_back(x);
    }
    for (auto& [stream, pieces] : queues) longest = std::max(longest, queue_lower_bound(pieces));
    for (tier_id t = 0; t < tiers_; ++t) {
      std::vector<piece> runs;
      for (auto o : needed_)
        if (p_.operations()[o].on == t && first_[o] != never && last_[o] != never)
          runs.push_back({first_[o], p_.operations()[o].seconds, last_[o]});
      longest = std::max(longest, queue_lower_bound(runs));
    }
    return longest;
  }

  /// Tells `copy_bound_in_span` what this turn knows of a relaxation.
  /// @param part the result of `as_plain` for `inside`
  /// @param x    result: all members by operation and by value
  void look_at(const plain_part& part, tier_set inside, bound::time_span& x) const {
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
  /// Work of a queue, s: the least time before it in the turn, its own time, and the least time after it.
  struct piece {
    double before, seconds, after;
  };
  struct copy {
    value_id value;
    std::size_t link;
    bool value_made;
    piece when;
  };

  /// True if all work begins after the begin of the turn.
  bool all_begins() const { return turn_ == device_tier || turn_ == any_tier; }
  /// True if the copy must end before the end of the turn.
  bool leaves(const copy& c) {
    const auto from = p_.links()[c.link].from;
    if (turn_ != any_tier) return (from == turn_ || from == device_tier) && !stay_[c.value].has(from);
    const auto ends = p_.values()[c.value].ends;
    return p_.is_target(c.value) && ends != any_tier && leads_over(c, ends);
  }
  /// True if an operation on tier `on` that makes `v` must end before the end of the turn.
  bool leaves(value_id v, tier_id on) const {
    if (on == device_tier) return true;
    if (turn_ != any_tier) return on == turn_ && !stay_[v].has(on);
    return p_.is_target(v) && (p_.values()[v].ends == on || p_.values()[v].ends == any_tier);
  }
  double& at(std::vector<double>& times, value_id v, tier_id t) const { return times[v * tiers_ + t]; }

  /// Lists the copies that every schedule makes.
  void look() {
    for (value_id v = 0; v < where_.made.size(); ++v) {
      copies_of_.push_back(copies_.size());
      for (auto l : facts_.links_passed(v)) {
        const auto& link = p_.links()[l];
        copies_.push_back(
            {v, l, !p_.is_source(v), {never, link.latency + static_cast<double>(p_.values()[v].bytes) / link.rate, never}});
      }
    }
    copies_of_.push_back(copies_.size());
  }
  /// Finds the earliest time, after the begin of the turn, of each value on each tier and of the begin of each operation and
  /// copy.
  void go_back() {
    for (value_id v = 0; v < where_.made.size(); ++v)
      for (tier_id t = 0; t < tiers_ && p_.is_source(v) && all_begins(); ++t)
        at(before_, v, t) = where_.made[v] == any_tier ? 0 : way_(v, where_.made[v], t);
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
  /// Finds the least time from the end of each operation and copy to the end of the turn.
  void go_on() {
    for (auto& c : copies_) {
      if (!leaves(c)) continue;
      c.when.after = 0;
      if (c.value_made) raise(after_[c.value], way_(c.value, where_.made[c.value], p_.links()[c.link].from) + c.when.seconds);
    }
    for (auto o = needed_.rbegin(); o != needed_.rend(); ++o) {
      const auto& op = p_.operations()[*o];
      auto& last = last_[*o];
      for (auto v : op.outputs) {
        if (leaves(v, op.on)) raise(last, 0);
        raise(last, after_[v]);
      }
      for (auto v : op.inputs)
        if (!p_.is_source(v)) raise(after_[v], op.seconds + last + way_(v, where_.made[v], op.on));
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
  /// True if the value of `c` can reach tier `to` only by this copy.
  bool leads_over(const copy& c, tier_id to) {
    const auto& links = facts_.narrow.between(where_.made[c.value], to);
    return std::find(links.begin(), links.end(), c.link) != links.end();
  }
  static void raise(double& x, double to) { x = std::max(x, to); }
  /// A lower bound on the time from the begin of the turn to the end of the first run of operation `last`, s. The copies of the
  /// sources that `last` and its ancestors read use each queue one after another. The ancestors on each tier run one after
  /// another.
  double before(operation_id last) {
    std::vector<double> until(p_.operations().size(), never);  // from the end of an ancestor to the begin of `last`
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
          raise(until[p_.producer(v)], way_(v, where_.made[v], op.on) + op.seconds + then);
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
    for (auto& [stream, pieces] : queues) longest = std::max(longest, queue_lower_bound(pieces));
    for (auto& pieces : runs) longest = std::max(longest, queue_lower_bound(pieces));
    return longest + p_.operations()[last].seconds;
  }
  /// A lower bound on the time of pieces that follow one another in any order, s. For each k, takes the k pieces with the largest
  /// `before`, and those with the largest `after`: the least time before them, all their seconds, and the least time after them.
  static double queue_lower_bound(std::vector<piece>& pieces) {
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

  tier_facts& facts_;
  const problem& p_;
  const tier_id turn_;
  const std::size_t tiers_;
  const std::vector<operation_id>& needed_;
  const places& where_;
  const copy_distances& way_;
  const std::vector<tier_set>& stay_;
  std::vector<double> before_;          // by value and tier: earliest time there, s
  std::vector<double> after_;           // by value: least time to the end of the turn, s, from when and where it is made
  std::vector<double> first_, last_;    // by operation: least time before its begin, and after its end, s
  std::vector<copy> copies_;            // in the order of their values
  std::vector<std::size_t> copies_of_;  // index of the first copy of each value, and the end
};

/// The tiers whose turns bound the time: all tiers, or `any_tier` alone if the problem is not cyclic.
inline std::vector<tier_id> turns_of(const problem& p) {
  if (p.next().empty()) return {any_tier};
  std::vector<tier_id> all;
  for (tier_id t = 0; t < p.tiers().size(); ++t) all.push_back(t);
  return all;
}

}  // namespace detail

}  // namespace remat::tiers
