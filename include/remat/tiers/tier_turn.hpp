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
  for (value_id v = 0; v < p.values().size(); ++v) stay.push_back(p.is_source(v) ? tier_set(facts.places.made[v]) : tier_set());
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
        places_(facts.places),
        distance_(facts.distance),
        stay_(stay),
        earliest_(p_.values().size() * tiers_, never),
        remaining_(p_.values().size(), never),
        head_(p_.operations().size(), never),
        tail_(head_) {
    list_copies();
    find_heads();
    find_tails();
  }

  tier_id tier() const { return turn_; }
  /// A lower bound on the length of the turn, s.
  /// @param stop polled for each copy; true returns what is proven by then
  /// Complexity: O(copies (values + edges) log(operations)).
  double seconds(const std::function<bool()>& stop = {}) {
    double longest = 0;
    for (auto o : needed_) longest = std::max(longest, head_[o] + p_.operations()[o].seconds + tail_[o]);
    std::map<std::string, std::vector<piece>> queues;
    std::vector<double> made(head_.size(), never);
    for (auto& c : copies_) {
      auto& x = c.work;
      if (c.value_made && x.head != never && !(stop && stop())) {
        auto& when = made[p_.producer(c.value)];
        if (when == never) when = earliest_end(p_.producer(c.value));
        raise(x.head, when + distance_(c.value, places_.made[c.value], p_.links()[c.link].from));
      }
      if (x.head != never && x.tail != never) queues[p_.links()[c.link].stream].push_back(x);
    }
    for (auto& [stream, pieces] : queues) longest = std::max(longest, queue_lower_bound(pieces));
    for (tier_id t = 0; t < tiers_; ++t) {
      std::vector<piece> runs;
      for (auto o : needed_)
        if (p_.operations()[o].on == t && head_[o] != never && tail_[o] != never)
          runs.push_back({head_[o], p_.operations()[o].seconds, tail_[o]});
      longest = std::max(longest, queue_lower_bound(runs));
    }
    return longest;
  }

  /// Tells `copy_bound_in_span` what this turn knows of a relaxation.
  /// @param relaxed the result of `relax_to_plain` for `inside`
  /// @param x       result: all members by operation and by value
  void describe_span(const plain_relaxation& relaxed, tier_set inside, bound::time_span& x) const {
    const auto& q = relaxed.p;
    const bool cyclic = turn_ != any_tier, gate = cyclic && is_gate(p_, inside, turn_);
    for (operation_id o = 0; o < relaxed.operations.size(); ++o) {
      x.earliest.push_back(head_[relaxed.operations[o]]);
      x.may_be_tau.push_back(x.earliest[o] >= 0 && p_.operations()[relaxed.operations[o]].on == device_tier);
    }
    const auto in_time = [&](value_id v) {
      return all_work_begins_within() || (gate && !(q.is_source(v) && p_.values()[v].starts == turn_));
    };
    for (value_id v = 0; v < q.values().size(); ++v) {
      const bool real = v < p_.values().size();
      const bool dropped = real && gate && !stay_[v].has(turn_);
      x.offloads_within.push_back(real && in_time(v));
      x.final_offload_within.push_back(
          real && (cyclic ? dropped : p_.is_target(v) && p_.values()[v].ends != any_tier && !inside.has(p_.values()[v].ends)));
      const auto readers = q.consumers(v);
      x.prefetches_within.push_back(real && (dropped || std::all_of(readers.begin(), readers.end(), [&](operation_id o) {
                                               const auto reader = relaxed.operations[o];
                                               return p_.operations()[reader].on == device_tier ||
                                                      (q.operations()[o].once && tail_[reader] != never);
                                             })));
    }
  }

 private:
  static constexpr double never = -std::numeric_limits<double>::infinity();
  /// Work of a queue, s: the least time before it in the turn, its own time, and the least time after it.
  struct piece {
    double head, seconds, tail;
  };
  struct copy {
    value_id value;
    std::size_t link;
    bool value_made;
    piece work;
  };

  /// True if all work begins after the begin of the turn.
  bool all_work_begins_within() const { return turn_ == device_tier || turn_ == any_tier; }
  /// True if the copy must end before the end of the turn.
  bool must_end_within(const copy& c) {
    const auto from = p_.links()[c.link].from;
    if (turn_ != any_tier) return (from == turn_ || from == device_tier) && !stay_[c.value].has(from);
    const auto ends = p_.values()[c.value].ends;
    return p_.is_target(c.value) && ends != any_tier && is_only_way(c, ends);
  }
  /// True if an operation on tier `on` that makes `v` must end before the end of the turn.
  bool must_end_within(value_id v, tier_id on) const {
    if (on == device_tier) return true;
    if (turn_ != any_tier) return on == turn_ && !stay_[v].has(on);
    return p_.is_target(v) && (p_.values()[v].ends == on || p_.values()[v].ends == any_tier);
  }
  double& cell(std::vector<double>& times, value_id v, tier_id t) const { return times[v * tiers_ + t]; }

  /// Lists the copies that every schedule makes.
  void list_copies() {
    for (value_id v = 0; v < places_.made.size(); ++v) {
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
  void find_heads() {
    for (value_id v = 0; v < places_.made.size(); ++v)
      for (tier_id t = 0; t < tiers_ && p_.is_source(v) && all_work_begins_within(); ++t)
        cell(earliest_, v, t) = places_.made[v] == any_tier ? 0 : distance_(v, places_.made[v], t);
    for (auto& c : copies_) {
      const auto to = p_.links()[c.link].to;
      if (c.value_made || to != turn_ || all_work_begins_within()) continue;
      c.work.head = 0;
      for (tier_id t = 0; t < tiers_; ++t)
        if (is_only_way(c, t)) cell(earliest_, c.value, t) = c.work.seconds + distance_(c.value, turn_, t);
    }
    for (auto o : needed_) {
      const auto& op = p_.operations()[o];
      if (all_work_begins_within() || op.on == turn_) head_[o] = 0;
      for (auto v : op.inputs) head_[o] = std::max(head_[o], cell(earliest_, v, op.on));
      for (auto v : op.outputs)
        for (tier_id t = 0; t < tiers_; ++t) cell(earliest_, v, t) = head_[o] + op.seconds + distance_(v, op.on, t);
    }
    for (auto& c : copies_) c.work.head = std::max(c.work.head, cell(earliest_, c.value, p_.links()[c.link].from));
  }
  /// Finds the least time from the end of each operation and copy to the end of the turn.
  void find_tails() {
    for (auto& c : copies_) {
      if (!must_end_within(c)) continue;
      c.work.tail = 0;
      if (c.value_made)
        raise(remaining_[c.value], distance_(c.value, places_.made[c.value], p_.links()[c.link].from) + c.work.seconds);
    }
    for (auto o = needed_.rbegin(); o != needed_.rend(); ++o) {
      const auto& op = p_.operations()[*o];
      auto& tail = tail_[*o];
      for (auto v : op.outputs) {
        if (must_end_within(v, op.on)) raise(tail, 0);
        raise(tail, remaining_[v]);
      }
      for (auto v : op.inputs)
        if (!p_.is_source(v)) raise(remaining_[v], op.seconds + tail + distance_(v, places_.made[v], op.on));
    }
    for (auto& c : copies_) {
      const auto to = p_.links()[c.link].to;
      for (auto o : p_.consumers(c.value)) {
        const auto& op = p_.operations()[o];
        if (is_only_way(c, op.on)) raise(c.work.tail, op.seconds + tail_[o] + distance_(c.value, to, op.on));
      }
      for (auto i = copies_of_[c.value]; i < copies_of_[c.value + 1]; ++i)
        if (const auto from = p_.links()[copies_[i].link].from; must_end_within(copies_[i]) && is_only_way(c, from))
          raise(c.work.tail, distance_(c.value, to, from) + copies_[i].work.seconds);
    }
  }
  /// True if the value of `c` can reach tier `to` only by this copy.
  bool is_only_way(const copy& c, tier_id to) {
    const auto& links = facts_.bridges.between(places_.made[c.value], to);
    return std::find(links.begin(), links.end(), c.link) != links.end();
  }
  static void raise(double& x, double to) { x = std::max(x, to); }
  /// A lower bound on the time from the begin of the turn to the end of the first run of operation `last`, s. The copies of the
  /// sources that `last` and its ancestors read use each queue one after another. The ancestors on each tier run one after
  /// another.
  double earliest_end(operation_id last) {
    std::vector<double> until(p_.operations().size(), never);  // from the end of an ancestor to the begin of `last`
    std::map<value_id, std::vector<operation_id>> read;
    std::vector<std::vector<piece>> runs(tiers_);
    until[last] = -p_.operations()[last].seconds;
    for (auto o = std::upper_bound(needed_.begin(), needed_.end(), last); o != needed_.begin();) {
      const auto& op = p_.operations()[*--o];
      const double rest = until[*o];
      if (rest == never) continue;
      if (*o != last && head_[*o] != never) runs[op.on].push_back({head_[*o], op.seconds, rest});
      for (auto v : op.inputs)
        if (p_.is_source(v))
          read[v].push_back(*o);
        else
          raise(until[p_.producer(v)], distance_(v, places_.made[v], op.on) + op.seconds + rest);
    }
    std::map<std::string, std::vector<piece>> queues;
    for (const auto& [v, readers] : read)
      for (auto i = copies_of_[v]; i < copies_of_[v + 1]; ++i) {
        const auto& c = copies_[i];
        piece x{c.work.head, c.work.seconds, never};
        for (auto o : readers)
          if (const auto& op = p_.operations()[o]; is_only_way(c, op.on))
            raise(x.tail, distance_(v, p_.links()[c.link].to, op.on) + op.seconds + until[o]);
        if (x.head != never && x.tail != never) queues[p_.links()[c.link].stream].push_back(x);
      }
    double longest = head_[last];
    for (auto& [stream, pieces] : queues) longest = std::max(longest, queue_lower_bound(pieces));
    for (auto& pieces : runs) longest = std::max(longest, queue_lower_bound(pieces));
    return longest + p_.operations()[last].seconds;
  }
  /// A lower bound on the time of pieces that follow one another in any order, s. For each k, takes the k pieces with the largest
  /// `head`, and those with the largest `tail`: the least time before them, all their seconds, and the least time after them.
  static double queue_lower_bound(std::vector<piece>& pieces) {
    double longest = 0;
    for (const auto key : {&piece::head, &piece::tail}) {
      std::sort(pieces.begin(), pieces.end(), [&](const piece& a, const piece& b) { return a.*key > b.*key; });
      piece all{std::numeric_limits<double>::infinity(), 0, std::numeric_limits<double>::infinity()};
      for (const auto& x : pieces) {
        all = {std::min(all.head, x.head), all.seconds + x.seconds, std::min(all.tail, x.tail)};
        longest = std::max(longest, all.head + all.seconds + all.tail);
      }
    }
    return longest;
  }

  tier_facts& facts_;
  const problem& p_;
  const tier_id turn_;
  const std::size_t tiers_;
  const std::vector<operation_id>& needed_;
  const value_places& places_;
  const copy_distances& distance_;
  const std::vector<tier_set>& stay_;
  std::vector<double> earliest_;        // by value and tier: earliest time there, s
  std::vector<double> remaining_;       // by value: least time to the end of the turn, s, from when and where it is made
  std::vector<double> head_, tail_;     // by operation: least time before its begin, and after its end, s
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
