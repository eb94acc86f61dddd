// SPDX-License-Identifier: Apache-2.0
/// @file
/// When a schedule has each value on the device, and whether it keeps, recomputes or moves the value.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/structure/backward_start.hpp>

namespace remat {

/// What a schedule does with a value.
enum class fate : std::uint8_t {
  held,        ///< a source: a parameter or an input
  kept,        ///< made by the forward, and on the device until the backward reads it
  recomputed,  ///< dropped, and computed again for a later use
  moved,       ///< copied to another tier
  temporary    ///< read by its own pass only
};

inline constexpr std::array<std::string_view, 5> fate_names = {"held", "kept", "recomputed", "moved", "temporary"};
inline constexpr std::string_view to_string(fate f) { return fate_names[static_cast<std::size_t>(f)]; }

/// One stay of a value, or of the workspace of an operation, on the device. Times are numbers of events. Each event allocates or
/// frees.
struct device_span {
  static constexpr std::int64_t to_the_end = -1;
  value_id value = none;            ///< `none`: a workspace
  operation_id maker = none;        ///< the operation that allocates the bytes; `none`: a copy, or there from the start
  bytes_t bytes = 0;                ///< > 0
  std::int64_t birth = 0;           ///< number of the event that allocates the bytes
  std::int64_t death = to_the_end;  ///< number of the event that frees the bytes
};

/// The spans of a schedule in the order of their allocations. They count memory as `evaluate` does: the largest sum of live
/// bytes after any event is the peak of the schedule.
/// @param p the problem
/// @param s a valid schedule of the problem
/// @throws bad_schedule if `s` is not valid
/// Complexity: that of `evaluate`.
inline std::vector<device_span> device_spans(const problem& p, const schedule& s) {
  evaluate(p, s);
  std::vector<device_span> spans;
  std::vector<std::size_t> open(p.values().size(), SIZE_MAX);  // per value: index of its span, or SIZE_MAX
  std::int64_t event = 0;
  const auto allocate = [&](value_id v, operation_id maker, bytes_t bytes) {
    if (bytes == 0) return SIZE_MAX;
    spans.push_back({v, maker, bytes, event++});
    return spans.size() - 1;
  };
  const auto release = [&](std::size_t& span) {
    if (const auto i = std::exchange(span, SIZE_MAX); i != SIZE_MAX) spans[i].death = event++;
  };
  const auto put = [&](value_id v) { open[v] = allocate(v, none, p.values()[v].bytes); };
  for (value_id v = 0; v < p.values().size(); ++v)
    if (p.is_source(v) && p.values()[v].starts == device_tier) put(v);
  for (const auto& [v, tier] : s.starts)
    if (tier == device_tier) put(v);
  for (const auto& given : s.steps) {
    const auto x = detail::with_tiers(p, given);
    if (x.what == action::copy) {
      if (x.to == device_tier) put(x.value());
    } else if (x.what == action::drop) {
      if (x.from == device_tier) release(open[x.value()]);
    } else if (const auto& op = p.operations()[x.operation()]; op.on == device_tier) {
      for (const auto& w : op.overwrites) release(open[w.input]);
      std::vector<std::size_t> replaced;  // the workspace, and old outputs: an operation makes new ones beside them
      for (auto v : op.outputs) {
        replaced.push_back(open[v]);
        open[v] = allocate(v, x.operation(), p.values()[v].bytes);
      }
      replaced.insert(replaced.begin(), allocate(none, x.operation(), op.workspace));
      for (auto& span : replaced) release(span);
    }
  }
  return spans;
}

/// The fate of each value.
/// @param p the problem
/// @param s a valid schedule of the problem
/// Complexity: O(values + edges + steps).
inline std::vector<fate> fates(const problem& p, const schedule& s) {
  std::vector<fate> all(p.values().size(), fate::temporary);
  const auto needed = needed_operations(p);
  const auto backward = needed.empty() ? operation_id{0} : needed[structure::backward_start(p, needed)];
  for (value_id v = 0; v < p.values().size(); ++v) {
    if (p.is_source(v)) all[v] = fate::held;
    if (p.is_source(v) || p.producer(v) >= backward) continue;
    for (auto reader : p.consumers(v))
      if (reader >= backward) all[v] = fate::kept;
  }
  std::vector<bool> dropped(p.values().size(), false);
  for (const auto& given : s.steps) {
    const auto x = detail::with_tiers(p, given);
    if (x.what == action::copy) {
      all[x.value()] = fate::moved;
    } else if (x.what == action::drop) {
      if (x.from == device_tier) dropped[x.value()] = true;
    } else {
      for (auto v : p.operations()[x.operation()].outputs)
        if (dropped[v] && all[v] != fate::moved) all[v] = fate::recomputed;
    }
  }
  return all;
}

}  // namespace remat
