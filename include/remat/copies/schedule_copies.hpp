// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies to the host and back for a fixed order of computations.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <remat/copies/copy_walk.hpp>
#include <remat/copies/demand_paging.hpp>
#include <remat/copies/placement.hpp>
#include <remat/copies/tiers_beyond_host.hpp>
#include <remat/copies/time_sorter.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/range_peak.hpp>

namespace remat::copies {

namespace detail {

/// Chooses the device as the start of sources that may start anywhere, if no operation on the host reads or replaces them and the
/// device has room for them all the time.
/// @param starts tier where each source starts; changed
/// @param memory bytes on the device at each position if a source that starts on the host is there from its first to its last use
inline void choose_starts_on_device(const problem& p, std::span<const operation_id> order, bytes_t budget, const placement& where,
                                    std::vector<tier_id>& starts, range_peak memory) {
  std::vector<std::size_t> first(starts.size(), order.size() + 1), end(starts.size(), order.size() + 1);  // uses, per value
  std::vector<bool> may_start = where.undecided;
  for (std::size_t i = 0; i < order.size(); ++i)
    for (auto v : p.operations()[order[i]].inputs) {
      first[v] = std::min(first[v], i);
      end[v] = i + 1;
      if (p.operations()[order[i]].on != device_tier) may_start[v] = false;
    }
  for (const auto& c : p.next())
    if (p.operations()[p.producer(c.target)].on != device_tier) may_start[c.source] = false;
  for (value_id v = 0; v < starts.size(); ++v) {
    const auto bytes = p.values()[v].bytes;
    if (!may_start[v] || starts[v] == device_tier || bytes == 0) continue;
    if (std::max(memory.max(0, first[v]), memory.max(end[v], order.size() + 1)) + bytes > budget) continue;
    memory.add(0, first[v], bytes);
    memory.add(end[v], order.size() + 1, bytes);
    starts[v] = device_tier;
  }
}

/// The first source that may start on the device and whose copy holds up the device. Looks only at the first copies to the
/// device, as long as they follow one another without a gap.
inline std::optional<value_id> first_awaited_source(const problem& p, const order_with_copies& laid, const placement& where,
                                                    const std::vector<tier_id>& starts) {
  double end = 0;
  for (const auto& x : laid.to_device) {
    if (x.begin > end * (1 + 1e-9)) break;
    end = x.end;
    const auto until = [&](const order_with_copies::wait& w) { return w.arrival && w.until == x.end; };
    if (p.is_source(x.value) && where.undecided[x.value] && starts[x.value] != device_tier &&
        std::any_of(laid.waits.begin(), laid.waits.end(), until))
      return x.value;
  }
  return std::nullopt;
}

/// `schedule_copies` for a device and one more tier, the host, which stands for all others.
///
/// Sources that may start anywhere start on the host. If the problem is cyclic, schedules in which some of them start on the
/// device are tried too, and the fastest schedule counts. These sources are, in this order: those whose replacement is on the
/// device at the end; those for which the device has room all the time; and those that the device would wait for at first.
inline std::optional<order_with_copies> lay_on_host(const problem& p, std::span<const operation_id> order, bytes_t budget,
                                                    const copy_options& o) {
  const auto walk_from = [&](const placement& where) { return copy_walk(p, order, budget, o, where); };
  const auto on_host = find_placement(p, std::vector<tier_id>(p.values().size(), tier_chain(p)[1]));
  auto best = walk_from(on_host).lay();
  if (p.next().empty() || std::find(on_host.undecided.begin(), on_host.undecided.end(), true) == on_host.undecided.end())
    return best;
  auto starts = std::vector<tier_id>(p.values().size(), on_host.neighbour), best_starts = starts;
  const auto try_starts = [&](const std::vector<tier_id>& from) {
    auto other = walk_from(find_placement(p, from)).lay();
    if (!other || (best && other->seconds >= best->seconds)) return false;
    best = std::move(other);
    best_starts = from;
    return true;
  };
  if (auto probe = walk_from(find_placement(p, std::vector<tier_id>(starts.size(), any_tier))); probe.lay()) {
    for (value_id v = 0; v < starts.size(); ++v)
      if (p.is_source(v) && probe.on_device_at_end(v)) starts[v] = device_tier;
    for (const auto& c : p.next())
      if (probe.on_device_at_end(c.target)) starts[c.source] = device_tier;
    try_starts(starts);
  }
  const auto before = starts;
  choose_starts_on_device(p, order, budget, on_host, starts, walk_from(find_placement(p, starts)).memory());
  if (starts != before) try_starts(starts);
  while (best) {
    starts = best_starts;
    const auto first = first_awaited_source(p, *best, on_host, starts);
    if (!first) break;
    starts[*first] = device_tier;
    if (!try_starts(starts)) break;
  }
  return best;
}

/// The transfers of each value, in their order.
class transfers_by_value {
 public:
  transfers_by_value(std::vector<order_with_copies::transfer> all, std::size_t values)
      : all_(std::move(all)), next_(all_.size()), first_(values) {
    for (auto i = all_.size(); i-- > 0;) next_[i] = std::exchange(first_[all_[i].value], i);
  }
  /// Takes the next transfer of `v`, and sets its times to `begin` and `end`, s.
  order_with_copies::transfer take(value_id v, double begin, double end) {
    const auto i = first_[v];
    first_[v] = next_[i];
    return {v, all_[i].next_use, begin, end};
  }

 private:
  std::vector<order_with_copies::transfer> all_;
  std::vector<std::size_t> next_, first_;
};

/// Sets the times, copies and waits of `laid` by `evaluate`, after `laid.schedule` was replaced.
/// @param order the computations of `laid.schedule`
inline void time_copies(const problem& p, std::span<const operation_id> order, order_with_copies& laid) {
  const auto e = evaluate(p, laid.schedule);
  auto copy = e.copies.begin();
  transfers_by_value sent(std::move(laid.to_host), p.values().size()), brought(std::move(laid.to_device), p.values().size());
  std::size_t position = 0;
  const auto to_device = [&] {
    while (position < order.size() && p.operations()[order[position]].on != device_tier) ++position;
  };
  double now = 0;
  laid.waits.clear();
  laid.to_host.clear();
  laid.to_device.clear();
  laid.seconds = e.seconds;
  to_device();
  for (std::size_t k = 0; k < laid.schedule.steps.size(); ++k) {
    const auto x = remat::detail::with_tiers(p, laid.schedule.steps[k]);
    if (x.what == action::copy) {
      if (x.from == device_tier) laid.to_host.push_back(sent.take(x.value(), copy->begin, copy->end));
      if (x.to == device_tier) laid.to_device.push_back(brought.take(x.value(), copy->begin, copy->end));
      ++copy;
      continue;
    }
    const bool computes = x.what == action::compute;
    if ((computes ? p.operations()[x.operation()].on : x.from) != device_tier) continue;
    const double begin = e.ends[k] - (computes ? p.operations()[x.operation()].seconds : 0);
    if (begin > now * (1 + 1e-12)) laid.waits.push_back({position, begin - now, begin, computes});
    now = e.ends[k];
    if (!computes) continue;
    ++position;
    to_device();
  }
}

/// Sorts the steps of `laid.schedule` by `time_sorter` if that is faster. Sets its times by `evaluate`.
inline void sort_by_time(const problem& p, std::span<const operation_id> order, order_with_copies& laid, bytes_t budget,
                         const std::function<bool()>& stop) {
  auto sorted = laid;
  time_copies(p, order, laid);
  sorted.schedule = time_sorter(p, laid.schedule, budget, stop).sorted();
  if (order.size() >= copy_options::polled_every && stop && stop()) return;
  time_copies(p, order, sorted);
  if (sorted.seconds < laid.seconds) laid = std::move(sorted);
}

/// `schedule_copies` for a problem that is not plain. First plans the copies between the device and the next tier, which stands
/// for all tiers beyond it. Then plans the copies between that tier and the tiers beyond it, recursively.
inline std::optional<order_with_copies> lay_tier_by_tier(const problem& p, std::span<const operation_id> order_given,
                                                         bytes_t budget, const copy_options& o) {
  const auto order = readers_before_overwrites(p, order_given);
  if (!order) return std::nullopt;
  auto front = lay_on_host(p, *order, budget, o);
  if (!front || tier_chain(p).size() == 2) return front;
  if (order->size() >= copy_options::polled_every && o.stop && o.stop()) return std::nullopt;
  if (!std::isfinite(front->seconds)) return std::nullopt;
  tiers_beyond_host tiers(p, *order, *front);
  const auto back =
      lay_tier_by_tier(tiers.beyond(), tiers.order(), tiers.budget(), {.frugal = o.frugal, .small = o.small, .stop = o.stop});
  if (!back) return std::nullopt;
  front->schedule = tiers.join(back->schedule);
  sort_by_time(p, *order, *front, budget, o.stop);
  return front;
}

/// `schedule_copies` on demand. Tries to start sources as near to the device as possible, and as far away; the faster schedule
/// counts.
inline std::optional<order_with_copies> lay_on_demand(const problem& p, std::span<const operation_id> order_given, bytes_t budget,
                                                      const copy_options& o) {
  std::optional<order_with_copies> best;
  const auto order = readers_before_overwrites(p, order_given);
  for (const bool near : {true, false}) {
    auto laid = order ? demand_paging(p, *order, budget, near, o.stop).lay() : std::nullopt;
    if (!laid) continue;
    sort_by_time(p, *order, *laid, budget, o.stop);
    if (!best || laid->seconds < best->seconds) best = std::move(laid);
  }
  return best;
}

}  // namespace detail

/// Adds copies to an order of computations so that it fits a budget.
///
/// If memory is short, the value whose next use is furthest away leaves the device. A value with a copy on the host leaves
/// without a wait. So values are offloaded ahead of time, as far as the link has time. They are prefetched in the order of their
/// next use, as early as memory allows. Sources that are not held move as well. Targets are back at the end.
///
/// On several tiers:
/// - A value that starts on the host or is made there is absent until its use on the device. A value that must go to the host is
///   the first to leave the device after its last use there.
/// - An operation on the host starts once the copies of its inputs to the host have been issued, so it may come earlier than in
///   `order`. An operation that overwrites a value comes after all readers of that value.
/// - In a cyclic problem, or if the host has a budget, the host drops values that it no longer needs.
/// - Tiers beyond the host are planned by the same rules. The host takes the place of the device, and its traffic with the device
///   takes the place of the computations.
/// @param p      a problem that allows copies, or one that is not plain and not `why_unplannable`
/// @param order  operations in the order of their execution; valid without drops
/// @param budget bytes of the device
/// @param o      which values are offloaded, and when to give up
/// @return a valid schedule within the budget that computes `order`; nothing if none was found, or if `o` made it give up. If all
///         values are movable, none is found only in these cases:
///         - the sources, the targets, or one operation with its inputs and outputs exceed the budget, each together with the
///           held values;
///         - on several tiers, another tier has no room, or `order` reads a value after it was overwritten
/// @throws bad_option if the problem allows no copies or is `why_unplannable`, `order` reads a value before it is made, or
///         `o.small` or `o.departures` is out of range
/// Complexity: O((uses + copies) log(order)), for each tier but the last.
/// Reference: Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966, for the value to evict.
/// @code
/// const auto laid = remat::copies::schedule_copies(p, remat::needed_operations(p), budget);
/// if (laid) std::cout << remat::evaluate(p, laid->schedule).seconds << " s with copies alone\n";
/// @endcode
inline std::optional<order_with_copies> schedule_copies(const problem& p, std::span<const operation_id> order, bytes_t budget,
                                                        const copy_options& o = {}) {
  if (!(o.small >= 0 && o.small <= 1)) throw bad_option("copy_options.small must be in [0, 1], got " + std::to_string(o.small));
  if (!o.departures.empty() && o.departures.size() != p.values().size())
    throw bad_option("copy_options.departures must say it of each of the " + std::to_string(p.values().size()) + " values, got " +
                     std::to_string(o.departures.size()));
  budget = clamp_budget(budget);
  if (!p.plain()) {
    if (const auto why = why_unplannable(p); !why.empty()) throw bad_option("schedule_copies: " + why);
    return o.on_demand ? detail::lay_on_demand(p, order, budget, o) : detail::lay_tier_by_tier(p, order, budget, o);
  }
  if (!p.copies()) throw bad_option("schedule_copies: the problem allows no copies");
  return detail::copy_walk(p, order, budget, o).lay();
}

}  // namespace remat::copies
