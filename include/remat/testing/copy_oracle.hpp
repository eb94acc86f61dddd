// SPDX-License-Identifier: Apache-2.0
/// @file
/// The optimum of tiny problems with copies by exhaustive search. Shares no code with any solver.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <utility>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::testing {

namespace detail {

inline constexpr std::size_t most_copied = 12;  ///< values

/// What is where, and for how much longer the streams and the copies of the values on the device are busy, in ticks.
struct copy_state {
  std::uint32_t device = 0, host = 0, once = 0;
  std::int64_t to_host = 0, to_device = 0;
  std::array<std::int64_t, most_copied> leaves{}, arrives{};
  friend bool operator==(const copy_state&, const copy_state&) = default;

  /// After some ticks.
  copy_state later(std::int64_t ticks) const {
    auto s = *this;
    const auto pass = [&](std::int64_t& t) { t = std::max<std::int64_t>(0, t - ticks); };
    pass(s.to_host);
    pass(s.to_device);
    for (auto& t : s.leaves) pass(t);
    for (auto& t : s.arrives) pass(t);
    return s;
  }
};

struct copy_state_hash {
  std::size_t operator()(const copy_state& s) const {
    std::uint64_t h = s.device | std::uint64_t{s.host} << 32;
    const auto mix = [&](std::uint64_t x) { h = (h ^ x ^ (h >> 29)) * 0x9e3779b97f4a7c15u; };
    mix(s.once);
    mix(static_cast<std::uint64_t>(s.to_host));
    mix(static_cast<std::uint64_t>(s.to_device));
    for (auto t : s.leaves) mix(static_cast<std::uint64_t>(t));
    for (auto t : s.arrives) mix(static_cast<std::uint64_t>(t));
    return static_cast<std::size_t>(h ^ (h >> 32));
  }
};

}  // namespace detail

/// The least time of any schedule of `p` within `budget`, copies to the host and back included: Dijkstra's algorithm on states
/// (values on the device, on the host, once-only operations that have run, and what the copy streams still have to do).
/// @param p      a problem with at most 12 values, whose times are multiples of a microsecond; beyond some five operations it
/// gets
///               slow
/// @param budget bytes
/// @param most   states; beyond that the search gives up
/// @return the optimum, s, infinity if no schedule fits; nothing if there are too many states
/// @throws bad_option if the problem has too many values or operations
/// Complexity: O(states (values + operations)).
/// @code
/// auto best = remat::testing::exhaustive_optimum_with_copies(p, 12);
/// @endcode
inline std::optional<double> exhaustive_optimum_with_copies(const problem& p, bytes_t budget, std::size_t most = 200'000) {
  using detail::copy_state;
  const auto nv = p.values().size();
  const auto& ops = p.operations();
  if (nv > detail::most_copied || ops.size() > 32)
    throw bad_option("exhaustive_optimum_with_copies: " + std::to_string(nv) + " values and " + std::to_string(ops.size()) +
                     " operations, at most 12 and 32 are possible");
  const auto bit = [](std::size_t i) { return std::uint32_t{1} << i; };
  const auto ticks = [](double seconds) { return std::llround(seconds * 1e6); };
  const auto bytes = [&](std::uint32_t set) {
    bytes_t sum = 0;
    for (std::size_t v = 0; v < nv; ++v)
      if (set & bit(v)) sum += p.values()[v].bytes;
    return sum;
  };
  std::uint32_t sources = 0, held = 0, targets = 0;
  for (value_id v = 0; v < nv; ++v) {
    if (p.is_source(v)) sources |= bit(v);
    if (p.values()[v].held) held |= bit(v);
    if (p.is_target(v)) targets |= bit(v);
  }
  const double never = std::numeric_limits<double>::infinity();
  if (p.source_bytes() > budget) return never;

  using entry = std::pair<std::int64_t, const copy_state*>;
  const auto later_first = [](const entry& a, const entry& b) { return a.first > b.first; };
  std::priority_queue<entry, std::vector<entry>, decltype(later_first)> queue(later_first);
  std::unordered_map<copy_state, std::int64_t, detail::copy_state_hash> least;
  const auto reach = [&](const copy_state& s, std::int64_t now) {
    const auto [at, added] = least.emplace(s, now);
    if (!added && at->second <= now) return;
    at->second = now;
    queue.emplace(now, &at->first);
  };
  copy_state start;
  start.device = sources;
  reach(start, 0);
  auto best = std::numeric_limits<std::int64_t>::max();
  while (!queue.empty()) {
    const auto [now, at] = queue.top();
    queue.pop();
    if (now >= best) break;
    const copy_state s = *at;
    if (now > least.at(s)) continue;
    if (least.size() > most) return std::nullopt;
    if ((s.device & targets) == targets) {
      std::int64_t wait = 0;
      for (auto v : p.targets()) wait = std::max(wait, s.arrives[v]);
      best = std::min(best, now + wait);
    }
    const auto live = bytes(s.device);
    for (std::size_t o = 0; o < ops.size(); ++o) {
      std::uint32_t inputs = 0, outputs = 0;
      std::int64_t wait = 0;
      for (auto v : ops[o].inputs) inputs |= bit(v), wait = std::max(wait, s.arrives[v]);
      for (auto v : ops[o].outputs) outputs |= bit(v);
      if ((inputs & ~s.device) || (s.once & bit(o)) || live + bytes(outputs) + ops[o].workspace > budget) continue;
      const auto took = wait + ticks(ops[o].seconds);
      auto next = s.later(took);
      next.device |= outputs;
      if (ops[o].once) next.once |= bit(o);
      for (auto v : ops[o].outputs) next.arrives[v] = 0;
      reach(next, now + took);
    }
    for (std::size_t v = 0; v < nv; ++v) {
      const bool here = s.device & bit(v);
      if (here && !(held & bit(v))) {
        const auto wait = std::max(s.leaves[v], s.arrives[v]);
        auto next = s.later(wait);
        next.device &= ~bit(v);
        reach(next, now + wait);
      }
      if (!p.copies()) continue;
      const double size = static_cast<double>(p.values()[v].bytes);
      if (here && p.values()[v].movable && !(held & bit(v)) &&
          !(s.host & bit(v))) {  // what is held need not move, and one copy is enough
        auto next = s;
        next.to_host = next.leaves[v] =
            std::max(s.to_host, s.arrives[v]) + ticks(p.copies()->latency + size / p.copies()->to_host);
        next.host |= bit(v);
        reach(next, now);
      }
      if (!here && (s.host & bit(v)) && live + p.values()[v].bytes <= budget) {
        auto next = s;
        next.to_device = next.arrives[v] = s.to_device + ticks(p.copies()->latency + size / p.copies()->to_device);
        next.device |= bit(v);
        reach(next, now);
      }
    }
  }
  return best == std::numeric_limits<std::int64_t>::max() ? never : static_cast<double>(best) * 1e-6;
}

}  // namespace remat::testing
