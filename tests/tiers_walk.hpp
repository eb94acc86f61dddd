// SPDX-License-Identifier: Apache-2.0
/// @file
/// Random schedules of problems on several tiers, valid and broken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tiers.hpp"

namespace remat::testing {

/// A random walk that mostly takes allowed steps, computes everything at least once, and tries to end as the problem demands.
class tiers_walk {
 public:
  tiers_walk(std::mt19937_64& g, const problem& p)
      : g_(g), p_(p), homes_(p.values().size(), any_tier), on_(p.values().size()), has_run_(p.operations().size()) {}

  schedule run() {
    for (value_id v = 0; v < homes_.size(); ++v) {
      if (!p_.is_source(v)) continue;
      homes_[v] = p_.values()[v].starts;
      if (homes_[v] == any_tier) s_.starts.push_back({v, homes_[v] = some_tier()});
      on_[v].insert(homes_[v]);
    }
    for (operation_id o = 0; o < has_run_.size(); ++o) {
      compute(o);
      for (auto n = uniform(g_, 0, 4); n > 0; --n) disturb();
    }
    finish();
    return std::move(s_);
  }

 private:
  tier_id some_tier() { return tier_id(uniform(g_, 0, static_cast<std::int64_t>(p_.tiers().size()) - 1)); }

  void compute(operation_id o) {
    const auto& op = p_.operations()[o];
    if (has_run_[o] && (op.once || !op.overwrites.empty()) && chance(g_, 93)) return;
    for (auto v : op.inputs) bring(v, op.on, 0);
    for (const auto& x : op.overwrites)
      if (chance(g_, 30)) copy_somewhere(x.input);
    s_.compute(o);
    has_run_[o] = true;
    for (const auto& x : op.overwrites) on_[x.input].erase(op.on);
    for (auto v : op.outputs) on_[v].insert(op.on);
  }

  /// Brings `v` to `t` by copies or by computing it, if possible.
  void bring(value_id v, tier_id t, int depth) {
    if (on_[v].contains(t) || depth > 6) return;
    for (const auto& l : p_.links())
      if (l.to == t && on_[v].contains(l.from) && chance(g_, 80)) return copy(v, l.from, t);
    if (!p_.is_source(v) && (on_[v].empty() || chance(g_, 40))) compute(p_.producer(v));
    if (on_[v].contains(t)) return;
    for (const auto& l : p_.links())
      if (l.to == t && !on_[v].contains(t)) {
        bring(v, l.from, depth + 1);
        if (on_[v].contains(l.from) && !on_[v].contains(t)) copy(v, l.from, t);
      }
  }

  void copy(value_id v, tier_id from, tier_id to) {
    const bool brief = chance(g_, 50);
    if (brief && from == device_tier && to == p_.host())
      s_.offload(v);
    else if (brief && from == p_.host() && to == device_tier)
      s_.prefetch(v);
    else
      s_.copy(v, from, to);
    on_[v].insert(to);
  }

  void copy_somewhere(value_id v) {
    for (const auto& l : p_.links())
      if (on_[v].contains(l.from) && !on_[v].contains(l.to) && chance(g_, 60)) return copy(v, l.from, l.to);
  }

  void drop(value_id v, tier_id t) {
    if (p_.values()[v].held && homes_[v] == t && chance(g_, 95)) return;
    s_.drop(v, t);
    on_[v].erase(t);
  }

  void disturb() {
    const auto v = static_cast<value_id>(uniform(g_, 0, static_cast<std::int64_t>(on_.size()) - 1));
    if (chance(g_, 40)) copy_somewhere(v);
    if (on_[v].empty() || (on_[v].size() == 1 && (p_.is_source(v) || chance(g_, 70)))) return;
    const auto places = std::vector<tier_id>(on_[v].begin(), on_[v].end());
    if (chance(g_, 70)) drop(v, pick(g_, places));
  }

  void finish() {
    if (!p_.next().empty())
      for (value_id v = 0; v < homes_.size(); ++v)  // sources that stay come back before their inputs are dropped
        if (homes_[v] != any_tier && !successor(v)) bring(v, homes_[v], 0);
    for (auto v : p_.targets()) {
      auto t = p_.values()[v].ends;
      for (const auto& c : p_.next())
        if (c.target == v) t = homes_[c.source];
      if (t == any_tier && on_[v].empty()) t = device_tier;
      if (t != any_tier) bring(v, t, 0);
    }
    if (p_.next().empty()) return;
    auto expected = homes_;
    for (const auto& [target, source] : p_.next()) expected[target] = std::exchange(expected[source], any_tier);
    for (value_id v = 0; v < on_.size(); ++v)
      for (auto t : std::set<tier_id>(on_[v]))
        if (t != expected[v] && (expected[v] != any_tier || homes_[v] != any_tier || !p_.is_target(v)) && chance(g_, 98))
          drop(v, t);
  }

  const value_id* successor(value_id v) const {
    for (const auto& c : p_.next())
      if (c.source == v) return &c.target;
    return nullptr;
  }

  std::mt19937_64& g_;
  const problem& p_;
  schedule s_;
  std::vector<tier_id> homes_;
  std::vector<std::set<tier_id>> on_;
  std::vector<bool> has_run_;
};

/// Makes a schedule probably invalid: removes, adds, changes or moves a step or a start.
inline void break_tiers(std::mt19937_64& g, const problem& p, schedule& s) {
  const auto some_tier = [&] { return tier_id(uniform(g, 0, static_cast<std::int64_t>(p.tiers().size()) - 1)); };
  const auto value = [&] { return static_cast<index_t>(uniform(g, 0, static_cast<std::int64_t>(p.values().size()))); };
  if (!s.starts.empty() && chance(g, 15)) {
    auto& start = pick(g, s.starts);
    if (chance(g, 40)) return void(s.starts.erase(s.starts.begin() + (&start - s.starts.data())));
    if (chance(g, 50)) return void(s.starts.push_back(start_place(start)));
    start = {value(), some_tier()};
    return;
  }
  if (s.steps.empty()) return;
  step other(static_cast<action>(uniform(g, 0, 4)), value());
  if (other.what == action::copy) other.to = some_tier();
  if (other.what == action::copy || other.what == action::drop) other.from = some_tier();
  auto& at = pick(g, s.steps);
  switch (uniform(g, 0, 3)) {
    case 0:
      s.steps.erase(s.steps.begin() + (&at - s.steps.data()));
      break;
    case 1:
      s.steps.insert(s.steps.begin() + (&at - s.steps.data()), other);
      break;
    case 2:
      at = other;
      break;
    default:
      std::swap(at, pick(g, s.steps));
  }
}

}  // namespace remat::testing
