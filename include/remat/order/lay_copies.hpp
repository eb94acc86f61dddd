// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies to the host and back for a fixed order of computations.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/order/copy_layer.hpp>
#include <remat/order/residence.hpp>

namespace remat::order {

namespace detail {

/// `lay_copies` for a problem that is not plain. Sources that may start anywhere start on the host or, where steps repeat and
/// that is faster, on the device if what takes their place is there at the end.
inline std::optional<laid_copies> lay_tiers(const problem& p, std::span<const operation_id> given, bytes_t budget,
                                            const copy_options& o) {
  if (const auto why = unplannable(p); !why.empty()) throw bad_option("lay_copies: " + why);
  const auto order = overwrite_last(p, given);
  if (!order) return std::nullopt;
  const auto layer = [&](const residence& where) { return copy_layer(p, *order, budget, o, where); };
  std::vector<tier_id> starts(p.values().size(), far_tier);
  const auto on_host = find_residence(p, starts);
  auto best = layer(on_host).lay();
  if (p.next().empty() || std::find(on_host.undecided.begin(), on_host.undecided.end(), true) == on_host.undecided.end())
    return best;
  auto probe = layer(find_residence(p, std::vector<tier_id>(starts.size(), any_tier)));
  if (!probe.lay()) return best;
  for (value_id v = 0; v < starts.size(); ++v)
    if (p.is_source(v) && probe.here(v)) starts[v] = device_tier;
  for (const auto& c : p.next())
    if (probe.here(c.target)) starts[c.source] = device_tier;
  auto other = layer(find_residence(p, starts)).lay();
  return other && (!best || other->seconds < best->seconds) ? other : best;
}

}  // namespace detail

/// Adds copies to an order of computations so that it fits a budget.
///
/// Values leave when room is lacking, the one used last first; those that have a copy on the host leave at once, so everything
/// that the link has time for is sent beforehand. They come back in the order of their use, as early as memory allows. Sources
/// that are not held are moved as well; targets are back at the end.
///
/// On two tiers, what starts on the host or is made there is absent until it is used, and what is to go there is used last. An
/// operation on the host runs as soon as what it reads is on its way, so it may come earlier than in `order`; one that overwrites
/// comes after what reads that. Where steps repeat, or the host has a budget, what it does not need is dropped there.
/// @param p      a problem that allows copies, or one that is not plain and not `unplannable`
/// @param order  operations in the order of their execution; valid without drops
/// @param budget bytes
/// @param o      what is sent
/// @return a valid schedule within the budget that computes `order`; nothing if there is none, which, if all values are
///         movable, is the case only if the sources, the targets, or one operation with what it reads and writes, each with what
///         is held, exceed the budget; or, on two tiers, if the host has no room or reads come after what overwrites
/// @throws bad_option if the problem allows no copies or is `unplannable`, or the order reads what is not there
/// Complexity: O((uses + copies) log(order)).
/// Reference: Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966, for what leaves.
/// @code
/// const auto laid = remat::order::lay_copies(p, remat::needed_operations(p), budget);
/// if (laid) std::cout << remat::evaluate(p, laid->schedule).seconds << " s with copies alone\n";
/// @endcode
inline std::optional<laid_copies> lay_copies(const problem& p, std::span<const operation_id> order, bytes_t budget,
                                             const copy_options& o = {}) {
  if (!(o.small >= 0 && o.small <= 1)) throw bad_option("copy_options.small must be in [0, 1], got " + std::to_string(o.small));
  if (!o.among.empty() && o.among.size() != p.values().size())
    throw bad_option("copy_options.among must say it of each of the " + std::to_string(p.values().size()) + " values, got " +
                     std::to_string(o.among.size()));
  if (!p.plain()) return detail::lay_tiers(p, order, budget, o);
  if (!p.copies()) throw bad_option("lay_copies: the problem allows no copies");
  return detail::copy_layer(p, order, budget, o).lay();
}

}  // namespace remat::order
