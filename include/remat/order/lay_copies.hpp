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

/// `lay_copies` for a problem that is not plain.
inline std::optional<laid_copies> lay_tiers(const problem& p, std::span<const operation_id> given, bytes_t budget,
                                            const copy_options& o) {
  const auto order = overwrite_last(p, given);
  if (!order) return std::nullopt;
  std::vector<tier_id> other(p.values().size(), far_tier);
  auto best = copy_layer(p, *order, budget, o, find_residence(p, other)).lay();
  const auto& choice = find_residence(p, other).undecided;
  if (p.next().empty() || std::find(choice.begin(), choice.end(), true) == choice.end()) return best;
  std::fill(other.begin(), other.end(), any_tier);
  for (int pass = 0; pass < 2; ++pass) {  // what stays on the device at the end of a step starts there
    copy_layer probe(p, *order, budget, o, find_residence(p, other));
    auto laid = probe.lay();
    if (!laid) break;
    if (pass > 0) {
      if (!best || laid->seconds < best->seconds) best = std::move(laid);
      break;
    }
    std::fill(other.begin(), other.end(), far_tier);
    for (value_id v = 0; v < other.size(); ++v)
      if (p.is_source(v) && probe.here(v)) other[v] = device_tier;
    for (const auto& c : p.next())
      if (probe.here(c.target)) other[c.source] = device_tier;
  }
  return best;
}

}  // namespace detail

/// Adds copies to an order of computations so that it fits a budget.
///
/// Values leave when room is lacking, the one used last first; those that have a copy on the host leave at once, so everything
/// that the link has time for is sent beforehand. They come back in the order of their use, as early as memory allows. Sources
/// that are not held are moved as well; targets are back at the end.
/// @param p      a problem that allows copies
/// @param order  operations in the order of their execution; valid without drops
/// @param budget bytes
/// @param o      what is sent
/// @return a valid schedule within the budget that computes `order`; nothing if there is none, which, if all values are
///         movable, is the case only if the sources, the targets, or one operation with what it reads and writes, each with what
///         is held, exceed the budget
/// @throws bad_option if the problem allows no copies, or the order reads what is not there
/// Complexity: O((uses + copies) log(order)).
/// Reference: Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966, for what leaves.
/// @code
/// const auto laid = remat::order::lay_copies(p, remat::needed_operations(p), budget);
/// if (laid) std::cout << remat::evaluate(p, laid->schedule).seconds << " s with copies alone\n";
/// @endcode
inline std::optional<laid_copies> lay_copies(const problem& p, std::span<const operation_id> order, bytes_t budget,
                                             const copy_options& o = {}) {
  if (!(o.small >= 0 && o.small <= 1)) throw bad_option("copy_options.small must be in [0, 1], got " + std::to_string(o.small));
  if (!p.plain()) return detail::lay_tiers(p, order, budget, o);
  if (!p.copies()) throw bad_option("lay_copies: the problem allows no copies");
  return detail::copy_layer(p, order, budget, o).lay();
}

}  // namespace remat::order
