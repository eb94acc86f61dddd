// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of the device over the time of a schedule.
#pragma once

#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// Memory over time: pieces of constant memory, in order, without gaps.
struct memory_timeline {
  struct piece {
    double begin = 0, end = 0;      ///< s; equal for a piece that takes no time
    bytes_t bytes = 0;              ///< bytes on the device, outputs and workspace included
    bool recomputed = false;        ///< true if `operation` had run before
    operation_id operation = none;  ///< running operation; `none`: a wait, or a copy to the device
  };
  std::vector<piece> pieces;
  double seconds = 0;  ///< makespan
  bytes_t held = 0;    ///< bytes of the held sources
  bytes_t peak = 0;
};

/// Computes the memory of the device over time.
/// @param p the problem
/// @param s a valid schedule of it
/// @return a piece per compute step on the device, per wait, and (without duration) per copy to the device; for a cyclic
///         schedule, the pieces of one period
/// @throws bad_schedule if `s` is not valid
/// Complexity: that of `evaluate`.
inline memory_timeline trace_memory(const problem& p, const schedule& s) {
  const auto e = evaluate(p, s);
  memory_timeline t{.pieces = {}, .seconds = e.seconds, .held = p.held_bytes(), .peak = e.peak};
  std::vector<bool> has_run(p.operations().size(), false), on_device(p.values().size());
  for (value_id v = 0; v < p.values().size(); ++v) on_device[v] = p.is_source(v) && p.values()[v].starts == device_tier;
  bytes_t live = p.source_bytes();
  for (const auto& [v, tier] : s.starts) {
    if (tier != device_tier) continue;
    on_device[v] = true;
    live += p.values()[v].bytes;
    if (p.values()[v].held) t.held += p.values()[v].bytes;
  }
  double now = 0;
  const auto wait_until = [&](double then) {
    if (then <= now + 1e-9 * e.seconds) return;  // a rounding error is no wait
    t.pieces.push_back({now, then, live, false, none});
    now = then;
  };
  for (std::size_t at = 0; at < s.steps.size(); ++at) {
    const auto x = detail::with_tiers(p, s.steps[at]);
    if (x.what == action::compute) {
      const auto& op = p.operations()[x.which];
      if (op.on != device_tier) continue;
      wait_until(e.ends[at] - op.seconds);
      t.pieces.push_back({now, e.ends[at], e.memory[at], has_run[x.which], x.which});
      now = e.ends[at];
      has_run[x.which] = true;
      for (const auto& o : op.overwrites) {
        live -= p.values()[o.input].bytes;
        on_device[o.input] = false;
      }
      for (auto v : op.outputs) {
        if (!on_device[v]) live += p.values()[v].bytes;
        on_device[v] = true;
      }
    } else {
      wait_until(e.ends[at]);
      live = e.memory[at];
      const bool arrives = x.what == action::copy && x.to == device_tier;
      if (arrives) t.pieces.push_back({now, now, live, false, none});
      if (arrives || (x.what == action::drop && x.from == device_tier)) on_device[x.which] = arrives;
    }
  }
  wait_until(e.seconds);
  return t;
}

}  // namespace remat
