// SPDX-License-Identifier: Apache-2.0
/// @file
/// The optimum of small problems among staged schedules, by exhaustive search; shares no code with `checkmate`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat::testing {

/// Walks through all staged schedules. Stage t goes through the needed operations 0..t in order. It may compute each of them,
/// must compute t, and may drop any value at any time. A state is (stage, next operation, values on the device).
/// @param p            a problem with at most about 14 values
/// @param budget       bytes
/// @param extra_stages extra stages, without an operation of their own, before each stage but the first
/// @param last_stage   one more such stage at the end
/// @return the least time, s, or nothing if no staged schedule fits
/// Complexity: O(operations^2 2^values values).
inline std::optional<double> staged_optimum(const problem& p, bytes_t budget, unsigned extra_stages = 0,
                                            bool last_stage = false) {
  const auto nv = p.values().size();
  std::vector<operation_id> ops;
  std::vector<bool> wanted(nv, false);
  for (auto v : p.targets()) wanted[v] = true;
  for (auto o = static_cast<index_t>(p.operations().size()); o-- > 0;) {
    const auto& op = p.operations()[o];
    bool needed = false;
    for (auto v : op.outputs) needed = needed || wanted[v];
    if (!needed) continue;
    ops.insert(ops.begin(), o);
    for (auto v : op.inputs) wanted[v] = true;
  }

  const double never = std::numeric_limits<double>::infinity();
  const std::uint32_t sets = 1u << nv;
  std::vector<bytes_t> bytes(sets, 0);
  std::uint32_t at_start = 0, at_end = 0, held = 0;
  for (value_id v = 0; v < nv; ++v) {
    for (std::uint32_t set = 0; set < sets; ++set)
      if (set >> v & 1) bytes[set] += p.values()[v].bytes;
    if (p.is_source(v)) at_start |= 1u << v;
    if (p.is_target(v)) at_end |= 1u << v;
    if (p.values()[v].held) held |= 1u << v;
  }
  if (bytes[at_start] > budget) return std::nullopt;
  std::vector<double> least(sets, never);
  least[at_start] = 0;
  const auto drop = [&] {
    for (std::uint32_t set = sets; set-- > 0;)
      for (value_id v = 0; v < nv; ++v)
        if ((set >> v & 1) && !(held >> v & 1)) least[set ^ (1u << v)] = std::min(least[set ^ (1u << v)], least[set]);
  };
  drop();
  for (std::size_t t = 0; t < ops.size() + last_stage; ++t)
    for (unsigned round = t == 0 || t == ops.size() ? extra_stages : 0; round <= extra_stages;
         ++round)  // the last round is stage t itself
      for (std::size_t i = 0; i < std::min(ops.size(), t + (round == extra_stages)); ++i) {
        const auto& op = p.operations()[ops[i]];
        if (i < t && op.once) continue;
        std::uint32_t in = 0, out = 0;
        bytes_t extra = op.workspace;
        for (auto v : op.inputs) in |= 1u << v;
        for (auto v : op.outputs) out |= 1u << v, extra += p.values()[v].bytes;
        std::vector<double> next(sets, never);
        if (i < t) next = least;
        for (std::uint32_t set = 0; set < sets; ++set)
          if (least[set] < never && (set & in) == in && bytes[set] + extra <= budget)
            next[set | out] = std::min(next[set | out], least[set] + op.seconds);
        least = std::move(next);
        drop();
      }
  double best = never;
  for (std::uint32_t set = 0; set < sets; ++set)
    if ((set & at_end) == at_end) best = std::min(best, least[set]);
  if (best == never) return std::nullopt;
  return best;
}

}  // namespace remat::testing
