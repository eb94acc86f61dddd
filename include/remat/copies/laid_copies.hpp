// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules with copies, as `lay_copies` makes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::copies {

/// What a method for copies says of a problem that has none.
inline constexpr const char* no_copies = "the problem allows no copies to the host";

/// Whether a value may leave the device, and when it is sent.
enum class departure : std::uint8_t {
  never,
  in_turn,  ///< those used last go first
  first,    ///< before those that go in turn
};

/// Those that are moved leave in turn, the others never.
inline std::vector<departure> departures_of(const std::vector<bool>& moved) {
  std::vector<departure> values;
  for (const bool x : moved) values.push_back(x ? departure::in_turn : departure::never);
  return values;
}

/// What `lay_copies` sends to the host.
struct copy_options {
  bool frugal = false;  ///< only what memory asks for; otherwise all that the link has time for
  double small = 2e-5;  ///< values below that share of the budget are moved only where nothing else helps, in [0, 1]
  std::vector<departure> departures = {};  ///< per value. Empty: all in turn that the problem lets move; as beyond the host
  double most = std::numeric_limits<double>::infinity();  ///< s: what is seen to take longer is given up
  bool on_demand = false;  ///< on several tiers, nothing is sent or fetched before that must be, and the rest does not matter
  std::function<bool()> stop = {};                     ///< polled every `polled_every` computations; true gives up
  static constexpr std::size_t polled_every = 16'384;  ///< some hundredths of a second: smaller orders are laid in any case
};

/// A schedule with copies, and where it waits for them.
struct laid_copies {
  /// The computations are held up until a copy has ended.
  struct wait {
    std::size_t position;  ///< in the order, of the computation that is held up; its length: the end
    double seconds;        ///< s
    double until;          ///< s
    bool arrival;          ///< of a copy to the device; otherwise to the host
  };
  /// A copy.
  struct transfer {
    value_id value;
    std::size_t next;   ///< position in the order where the value is used next
    double begin, end;  ///< s
  };
  remat::schedule schedule;
  double seconds = 0;  ///< at most this, s: copies count that turned out useless and are not in `schedule`
  std::vector<wait> waits;
  std::vector<transfer> to_host, to_device;
};

namespace detail {

/// Takes out the copies to the host that nobody there or on the device reads, and their drops.
/// @param read the values that are read on the host after the schedule
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
