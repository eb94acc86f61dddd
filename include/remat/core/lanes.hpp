// SPDX-License-Identifier: Apache-2.0
/// @file
/// Activity of the device, the other tiers and the links over the time of a schedule.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat {

/// Activities that follow one another: the computations of a tier, or the copies of a stream.
struct lane {
  enum class work { computed, recomputed, copied, waited };
  struct span {
    double begin = 0, end = 0;  ///< s
    work what = work::computed;
  };
  std::string label;
  std::vector<span> spans;  ///< each takes time; for a cyclic schedule: of one period, cut at its end. A copy that no step waits
                            ///< for may end after the schedule
};

/// Memory of a tier over time.
struct tier_memory {
  std::string label;
  std::optional<bytes_t> budget;
  bytes_t peak = 0;
  std::vector<std::pair<double, bytes_t>> points;  ///< (time in s, ascending; bytes from then on)
};

/// Computes the activity over time. The device waits whenever it does not compute.
/// @param p the problem
/// @param s a valid schedule of it
/// @return the device first, then the other tiers that compute, then the streams in the order of the links
/// @throws bad_schedule if `s` is not valid
/// Complexity: that of `evaluate`.
/// @code
/// remat::timeline_svg(remat::trace_memory(p, s), {.lanes = remat::trace_lanes(p, s), .tiers = remat::trace_tiers(p, s)});
/// @endcode
inline std::vector<lane> trace_lanes(const problem& p, const schedule& s) {
  const auto e = evaluate(p, s);
  std::vector<lane> lanes;
  std::size_t streams = 0;  // index of the first stream, because a stream may have the name of a tier
  const auto find = [&](const std::string& label, std::size_t from) -> lane& {
    const auto found = std::find_if(lanes.begin() + static_cast<std::ptrdiff_t>(from), lanes.end(),
                                    [&](const lane& l) { return l.label == label; });
    return found != lanes.end() ? *found : lanes.emplace_back(lane{label, {}});
  };
  const auto computations = [&](tier_id t) -> lane& { return find(p.tiers()[t].name, 0); };
  const auto copies = [&](const copy_link& l) -> lane& {
    return find(p.plain() ? "to " + p.tiers()[l.to].name : l.stream, streams);
  };
  computations(device_tier);
  for (const auto& o : p.operations()) computations(o.on);
  streams = lanes.size();
  for (const auto& l : p.links()) copies(l);

  const auto add = [&](lane& to, double begin, double end, lane::work what) {
    while (!p.next().empty() && e.seconds > 0 && begin >= e.seconds) begin -= e.seconds, end -= e.seconds;
    if (!p.next().empty() && end > e.seconds) {  // continues in the next step
      if (begin > 0) to.spans.push_back({0, std::min(end - e.seconds, begin), what});
      end = e.seconds;
    }
    if (end > begin) to.spans.push_back({begin, end, what});
  };
  double now = 0;
  const auto wait_until = [&](double then) {
    if (then > now + 1e-9 * e.seconds) add(lanes[0], now, then, lane::work::waited);
    now = std::max(now, then);
  };
  std::vector<bool> has_run(p.operations().size(), false);
  std::size_t copied = 0;
  for (std::size_t at = 0; at < s.steps.size(); ++at) {
    const auto x = detail::with_tiers(p, s.steps[at]);
    if (x.what == action::copy) {
      const auto& c = e.copies[copied++];
      add(copies(*p.link(x.from, x.to)), c.begin, c.end, lane::work::copied);
    } else if (x.what == action::compute) {
      const auto& o = p.operations()[x.operation()];
      const auto begin = e.ends[at] - o.seconds;
      if (o.on == device_tier) wait_until(begin), now = e.ends[at];
      add(computations(o.on), begin, e.ends[at], has_run[x.operation()] ? lane::work::recomputed : lane::work::computed);
      has_run[x.operation()] = true;
    } else {
      wait_until(e.ends[at]);
    }
  }
  wait_until(e.seconds);
  return lanes;
}

/// Computes the memory of the tiers beyond the device over time. The order is that of the schedule, the clock that of the device:
/// the bytes of a copy count from the time at which the step issues it.
/// @param p the problem
/// @param s a valid schedule of it
/// @return one entry for each tier beyond the device that holds anything
/// @throws bad_schedule if `s` is not valid
/// Complexity: that of `evaluate`.
inline std::vector<tier_memory> trace_tiers(const problem& p, const schedule& s) {
  const auto e = evaluate(p, s);
  const auto count = p.tiers().size();
  std::vector<tier_memory> tiers;
  for (std::size_t t = 0; t < count; ++t) tiers.push_back({p.tiers()[t].name, p.tiers()[t].budget, e.peaks[t], {{0, 0}}});
  std::vector<std::vector<bool>> there(count, std::vector<bool>(p.values().size(), false));
  double now = 0;
  const auto add = [&](tier_id t, bytes_t bytes) { tiers[t].points.emplace_back(now, tiers[t].points.back().second + bytes); };
  const auto put = [&](value_id v, tier_id t, bool is_there) {
    if (there[t][v] != is_there) add(t, is_there ? p.values()[v].bytes : -p.values()[v].bytes);
    there[t][v] = is_there;
  };
  for (value_id v = 0; v < p.values().size(); ++v)
    if (p.is_source(v) && p.values()[v].starts != any_tier) put(v, p.values()[v].starts, true);
  for (const auto& [v, t] : s.starts) put(v, t, true);
  for (std::size_t at = 0; at < s.steps.size(); ++at) {
    const auto x = detail::with_tiers(p, s.steps[at]);
    if (x.what == action::compute) {
      const auto& o = p.operations()[x.operation()];
      if (o.on == device_tier) now = e.ends[at];
      bytes_t beside = o.workspace;  // an output that is already there needs its bytes twice
      for (auto v : o.outputs) beside += there[o.on][v] ? p.values()[v].bytes : 0;
      for (const auto& w : o.overwrites) put(w.input, o.on, false);
      for (auto v : o.outputs) put(v, o.on, true);
      if (beside > 0) add(o.on, beside), add(o.on, -beside);
    } else {
      now = std::max(now, e.ends[at]);
      put(x.value(), x.what == action::copy ? x.to : x.from, x.what == action::copy);
    }
  }
  for (auto& t : tiers) t.points.emplace_back(e.seconds, t.points.back().second);
  tiers.erase(tiers.begin());
  std::erase_if(tiers, [](const tier_memory& t) { return t.peak == 0; });
  return tiers;
}

}  // namespace remat
