// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule of a problem on several tiers. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include <remat/bound/copy_bound.hpp>
#include <remat/copies/placement.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/problem.hpp>
#include <remat/tiers/path_bound.hpp>
#include <remat/tiers/queue_bound.hpp>
#include <remat/tiers/tier_turn.hpp>
#include <remat/tiers/tiers_as_one.hpp>

namespace remat::tiers {

/// A lower bound on the time of every schedule of a problem on several tiers; for cyclic schedules, on the period.
///
/// The bound is the largest of four: busy queues (`detail::queue_bound`), longest paths (`detail::path_bound`), turns of tiers
/// (`detail::tier_turn`), and `copy_bound` of relaxations. A relaxation takes the first tiers of the chain for one memory: the
/// device alone, then the device and the next tier, and so on, as long as these tiers have a limit. It counts the values that
/// start or end beyond this memory, the copies that every schedule makes, and the wait for the first copies. For cyclic
/// schedules, `copy_bound` looks at one turn of a tier (`detail::tier_turn`).
/// @param p      a problem whose device is linked both ways with another tier
/// @param budget bytes of the device
/// @param stop   polled between cuts, paths and copies; true returns what is proven by then
/// @return a bound in s: no schedule within the budget is faster
/// @throws bad_option if no tier is linked both ways with the device
/// Complexity: that of `copy_bound`, for each relaxation and each turn.
/// @code
/// std::cout << "no step takes less than " << remat::tiers::tier_bound(p, budget) << " s\n";
/// @endcode
inline double tier_bound(const problem& p, bytes_t budget, const std::function<bool()>& stop = {}) {
  if (copies::tier_chain(p).size() < 2) throw bad_option("tier_bound: no tier is linked both ways with the device");
  double best = bounds_without_search(p).seconds;
  if (stop && stop()) return best;
  detail::tier_facts facts(p);
  best = std::max({best, detail::queue_bound(facts, budget), detail::path_bound(facts, stop)});
  if (stop && stop()) return best;
  const auto stay = detail::tiers_to_stay_on(facts);
  std::vector<detail::tier_turn> turns;
  for (auto t : detail::turns_of(p))
    if (!(stop && stop())) best = std::max(best, turns.emplace_back(facts, stay, t).seconds(stop));
  for (const auto& [inside, room] : detail::tier_prefixes(p, budget))
    for (const bool come : {false, true}) {  // sources that come give tighter bounds, but at other moments
      if (stop && stop()) return best;
      const auto part = detail::as_plain(p, inside, come, facts.where);
      if (bounds_without_search(part.p).budget > room) continue;
      for (const auto& turn : turns) {
        if (!p.next().empty() && turn.tier() != device_tier && !detail::is_gate(p, inside, turn.tier())) continue;
        if (stop && stop()) return best;
        auto span = detail::passing(p, part.p, inside, facts.where);
        turn.look_at(part, inside, span);
        best = std::max(best, bound::copy_bound_in_span(part.p, room, &span, best, {}, stop));
      }
    }
  return best;
}

}  // namespace remat::tiers
