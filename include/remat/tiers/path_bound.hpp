// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem on several tiers: the longest path.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/tiers/tier_places.hpp>

namespace remat::tiers {

namespace detail {

/// Longest paths of operations and copies that every schedule executes one after another: from the start to a target, or from a
/// source to the target that replaces it in the next step.
class tier_path {
 public:
  explicit tier_path(const tier_facts& facts)
      : p_(facts.p), needed_(facts.needed), tiers_(p_.tiers().size()), distance_(facts.distance) {}

  /// @param from  a source, or `none` for all sources
  /// @param to    a target that an operation makes
  /// @param there tier where `to` must end; `any_tier`: anywhere
  /// @return a lower bound, s: the largest of the longest path of operations and copies, and, for each tier, a sum over its
  ///         operations between `from` and `to`, which run one after another: all their seconds, the least time before the first
  ///         of them, and the least time after the last of them
  double seconds(value_id from, value_id to, tier_id there) const {
    std::vector<double> before(p_.values().size() * tiers_, never), after = before;
    const auto put = [&](value_id v, tier_id home, double then) {  // earliest times on all tiers, s; at home from `then` on
      for (tier_id t = 0; t < tiers_; ++t) before[v * tiers_ + t] = home == any_tier ? then : then + distance_(v, home, t);
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
    for (tier_id t = 0; t < tiers_; ++t) after[to * tiers_ + t] = there == any_tier ? 0 : distance_(to, t, there);
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
          after[v * tiers_ + t] = std::max(after[v * tiers_ + t], op.seconds + end + distance_(v, t, op.on));
      if (first(op) == never) continue;
      auto& r = runs[op.on];
      r.sum += op.seconds;
      r.head = std::min(r.head, first(op));
      r.tail = std::min(r.tail, end);
    }
    const auto* arrivals = &before[to * tiers_];
    double longest = std::max(0.0, there == any_tier ? *std::min_element(arrivals, arrivals + tiers_) : arrivals[there]);
    for (const auto& r : runs)
      if (r.sum > 0) longest = std::max(longest, r.head + r.sum + r.tail);
    return longest;
  }

 private:
  static constexpr double never = -std::numeric_limits<double>::infinity();

  const problem& p_;
  const std::vector<operation_id>& needed_;
  const std::size_t tiers_;
  const copy_distances& distance_;
};

/// A lower bound on the time of every schedule: the longest path of operations and copies to a target on the tier where it must
/// end. For a cyclic problem, a bound on the period: the longest path from a source to the target that replaces it.
/// Looks only at the 64 targets that are made last.
/// @param facts of a problem that is not plain
/// @param stop  polled between paths; true returns what is proven by then
/// @return s
/// Complexity: O(tiers (values + edges)) for each path.
inline double path_bound(const tier_facts& facts, const std::function<bool()>& stop = {}) {
  constexpr std::size_t max_paths = 64;
  const auto& p = facts.p;
  const tier_path longest_path(facts);
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
  paths.resize(std::min(paths.size(), max_paths));
  double longest = 0;
  for (const auto& x : paths)
    if (!(stop && stop())) longest = std::max(longest, longest_path.seconds(x.from, x.to, x.there));
  return longest;
}

}  // namespace detail

}  // namespace remat::tiers
