// SPDX-License-Identifier: Apache-2.0
/// @file
/// The judge: simulates a schedule. Shares no code with any solver.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <remat/core/evaluate_tiers.hpp>
#include <remat/core/evaluation.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

namespace detail {

/// `evaluate` for a plain problem and a plain schedule.
inline evaluation evaluate_device_and_host(const problem& p, const schedule& s) {
  const auto& values = p.values();
  const auto& ops = p.operations();
  const auto& copies = p.copies();

  evaluation e;
  e.memory.reserve(s.steps.size());
  std::vector<bool> on_device(values.size()), has_run(ops.size()), on_host(values.size());
  std::vector<double> prefetch_end(values.size(), 0), offload_end(values.size(), 0), host_ready(values.size(), 0);
  for (value_id v = 0; v < values.size(); ++v) on_device[v] = p.is_source(v);
  bytes_t live = p.source_bytes(), host_bytes = 0;
  double now = 0, to_host_free = 0, to_device_free = 0;
  e.peak = live;

  for (std::size_t k = 0; k < s.steps.size(); ++k) {
    const step x = s.steps[k];
    const auto what = x.what;
    const auto i = x.which;
    auto fail = [k, what, i](const std::string& why) {
      throw bad_schedule(
          k, "step " + std::to_string(k) + " (" + std::string(to_string(what)) + " " + std::to_string(i) + "): " + why);
    };
    if (what == action::compute) {
      if (i >= ops.size()) fail("no such operation");
      const auto& op = ops[i];
      if (has_run[i]) {
        if (op.once) fail("a once-only operation is computed again");
        ++e.recomputed;
      }
      has_run[i] = true;
      ++e.computed;
      bytes_t bytes = live + op.workspace;
      for (auto v : op.inputs) {
        if (!on_device[v]) fail("input " + std::to_string(v) + " is not on the device");
        now = std::max(now, prefetch_end[v]);
      }
      now += op.seconds;
      for (auto v : op.outputs) {
        bytes += values[v].bytes;
        if (!on_device[v]) live += values[v].bytes;
        on_device[v] = true;
        prefetch_end[v] = 0;
      }
      e.memory.push_back(bytes);
      e.ends.push_back(now);
      e.peak = std::max(e.peak, bytes);
      continue;
    }
    if (i >= values.size()) fail("no such value");
    if (what == action::prefetch) {
      if (!on_host[i]) fail("no copy on the host");
      if (on_device[i]) fail("the value is on the device");
      const double begin = std::max({now, to_device_free, host_ready[i]});
      to_device_free = begin + copies->latency + static_cast<double>(values[i].bytes) / copies->to_device;
      e.copies.push_back({k, begin, to_device_free});
      prefetch_end[i] = to_device_free;
      on_device[i] = true;
      live += values[i].bytes;
      e.peak = std::max(e.peak, live);
    } else {
      if (what == action::offload && !copies) fail("the problem allows no copies");
      if (what == action::offload && !values[i].movable) fail("the value may not be copied");
      if (!on_device[i]) fail("the value is not on the device");
      if (what == action::offload) {
        const double begin = std::max({now, to_host_free, prefetch_end[i]});
        to_host_free = begin + copies->latency + static_cast<double>(values[i].bytes) / copies->to_host;
        e.copies.push_back({k, begin, to_host_free});
        offload_end[i] = host_ready[i] = to_host_free;
        if (!on_host[i]) host_bytes += values[i].bytes;
        on_host[i] = true;
      } else {
        if (values[i].held) fail("a held value is dropped");
        now = std::max({now, offload_end[i], prefetch_end[i]});
        offload_end[i] = prefetch_end[i] = 0;
        on_device[i] = false;
        live -= values[i].bytes;
      }
    }
    e.memory.push_back(live);
    e.ends.push_back(now);
  }
  for (auto v : p.targets()) {
    if (!on_device[v]) throw bad_schedule(s.steps.size(), "target " + std::to_string(v) + " is not on the device at the end");
    now = std::max(now, prefetch_end[v]);
  }
  e.seconds = now;
  e.peaks = {e.peak, host_bytes};
  return e;
}

}  // namespace detail

/// Simulates `s` step by step, and measures its memory and time.
///
/// The device holds a set of values, at first the sources.
/// - `compute o`: every input of `o` is on the device. Memory = bytes on the device + bytes of *all* outputs of `o` (even if they
///   are on the device already) + workspace. Afterwards every output is on the device (once).
/// - `drop v`: `v` is on the device and not held; its bytes are free afterwards.
/// - `offload v`: a copy to the host starts. It frees nothing: a later `drop v` waits for the copy to end.
/// - `prefetch v`: a host copy of `v` exists or is under way and `v` is not on the device; its bytes count from here on.
///
/// Computations run one after the other, and so do the copies in each direction. A copy takes latency + bytes / rate. It starts
/// once the computations before it in the list have ended. A computation waits for its prefetched inputs. A prefetch waits for
/// the offload of its value. At the end all targets are on the device.
///
/// These are the rules for plain problems and schedules. `detail::evaluate_tiers` has the rules for all others. They agree on
/// plain ones, except that a value may not be copied again to a tier that has it.
///
/// @param p the problem
/// @param s the schedule
/// @return peak, time, counts and memory per step
/// @throws bad_schedule at the first step that breaks a rule, or at the end if a target is missing
/// Complexity: O(values + edges executed).
/// @code
/// auto e = remat::evaluate(p, plan.schedule);
/// std::cout << e.peak << " bytes, " << e.seconds << " s\n";
/// @endcode
inline evaluation evaluate(const problem& p, const schedule& s) {
  return p.plain() && s.plain() ? detail::evaluate_device_and_host(p, s) : detail::evaluate_tiers(p, s);
}

/// As `evaluate`, for callers that support offloads and prefetches but no tiers.
/// @throws bad_problem if `p` is not plain, naming the member; bad_schedule if `s` is not plain, or as `evaluate`
inline evaluation evaluate_plain(const problem& p, const schedule& s) {
  if (!p.plain()) throw bad_problem(p.beyond_plain() + ": beyond version 1 of the format, and not supported here");
  if (!s.starts.empty()) throw bad_schedule(0, "starts are not supported here");
  for (std::size_t k = 0; k < s.steps.size(); ++k)
    if (!s.steps[k].plain())
      throw bad_schedule(k, "step " + std::to_string(k) + ": it names a tier, which is not supported here");
  return evaluate(p, s);
}

/// The schedule that executes every operation once, in the order of the problem, and drops values as early as possible.
/// @return the schedule; `measure_store_all(p)` has the peak that `N%` budgets refer to
/// Complexity: O(values + edges).
inline schedule store_all_schedule(const problem& p) {
  std::vector<operation_id> order(p.operations().size());
  for (operation_id o = 0; o < order.size(); ++o) order[o] = o;
  return with_drops(p, order);
}

/// Peak and time of store-all, for comparison.
struct store_all_needs {
  bytes_t peak = 0;    ///< peak that `N%` budgets refer to, bytes
  double seconds = 0;  ///< time, s
};

/// Measures `store_all_schedule`. For a problem that is not plain, assumes that all values are on the device and that no
/// computation waits. Complexity: O(values + edges).
inline store_all_needs measure_store_all(const problem& p) {
  const auto s = store_all_schedule(p);
  if (p.plain()) {
    const auto e = evaluate(p, s);
    return {e.peak, e.seconds};
  }
  store_all_needs n{measure_order(p, compute_order(s)).peak, 0};
  for (const auto& op : p.operations())
    if (op.on == device_tier) n.seconds += op.seconds;
  return n;
}

}  // namespace remat
