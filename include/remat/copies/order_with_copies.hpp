// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules with copies, and the options for making them: input and output of `schedule_copies`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies {

/// The reason that a method for copies gives when the problem allows none.
inline constexpr const char* no_copies = "the problem allows no copies to the host";

/// Whether a value may be offloaded to the host, and in which order.
enum class departure : std::uint8_t {
  never,
  in_turn,  ///< furthest next use first
  first,    ///< before all values that are `in_turn`
};

/// Departures per value: `in_turn` for the values in `moved`, `never` for all others.
inline std::vector<departure> departures_of(const std::vector<bool>& moved) {
  std::vector<departure> values;
  for (const bool x : moved) values.push_back(x ? departure::in_turn : departure::never);
  return values;
}

/// Which values `schedule_copies` offloads, and when it gives up.
struct copy_options {
  bool frugal = false;  ///< true: offload only as much as the budget requires; false: as much as the link has time for
  double small = 2e-5;  ///< in [0, 1]: values below this share of the budget are offloaded only if nothing else makes room
  std::vector<departure> departures = {};  ///< per value. Empty: every movable value `in_turn`. Ignored beyond the host
  double max_seconds = std::numeric_limits<double>::infinity();  ///< gives up on schedules that take longer, s
  bool on_demand = false;           ///< for several tiers: by `demand_paging`, which ignores all other options but `stop`
  std::function<bool()> stop = {};  ///< polled every `polled_every` computations; true gives up
  static constexpr std::size_t polled_every = 16'384;  ///< some hundredths of a second; shorter orders are never interrupted
};

/// A schedule with copies, its waits, and the times of its copies.
struct order_with_copies {
  /// The device waits until a copy has ended.
  struct wait {
    std::size_t position;  ///< of the computation that waits, in the order; the length of the order: a wait at the end
    double seconds;        ///< duration, s
    double until;          ///< end of the wait, s
    bool arrival;          ///< true: waits for a copy to the device; false: for a copy to the host
  };
  /// A copy between the device and the host.
  struct transfer {
    value_id value;
    std::size_t next_use;  ///< position in the order of the next use of the value
    double begin, end;     ///< s
  };
  remat::schedule schedule;
  double seconds = 0;  ///< upper bound on the time, s: it includes useless copies that are no longer in `schedule`
  std::vector<wait> waits;
  std::vector<transfer> to_host, to_device;
};

namespace detail {

/// Removes the copies to the host that nothing reads there and that are not copied back, and their drops.
/// @param from the schedule, changed in place
/// @param read per value: true if it is read on the host after the schedule
/// Complexity: O(steps + values).
inline void drop_useless_offloads(const problem& p, schedule& from, std::vector<bool> read) {
  auto& steps = from.steps;
  constexpr auto nowhere = std::numeric_limits<std::size_t>::max();
  std::vector<bool> useless(steps.size(), false);
  std::vector<std::size_t> dropped(p.plain() ? 0 : read.size(), nowhere);
  for (auto k = steps.size(); k-- > 0;) {
    const auto& s = steps[k];
    if (s.what == action::compute) {
      if (dropped.empty() || p.operations()[s.operation()].on == device_tier) continue;
      for (auto v : p.operations()[s.operation()].inputs) read[v] = true;
    } else if (s.what == action::prefetch || (s.what == action::copy && s.to == device_tier)) {
      read[s.value()] = true;
    } else if (s.what == action::drop) {
      if (s.from != device_tier) dropped[s.value()] = k, read[s.value()] = false;
    } else if (!read[s.value()]) {
      useless[k] = true;
      if (!dropped.empty() && dropped[s.value()] != nowhere) useless[dropped[s.value()]] = true;
    }
  }
  std::size_t kept = 0;
  for (std::size_t k = 0; k < steps.size(); ++k)
    if (!useless[k]) steps[kept++] = steps[k];
  steps.resize(kept);
}

}  // namespace detail

}  // namespace remat::copies
