// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a schedule does over time: memory of the device and the other tiers, computations, copies and waits.
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

/// A schedule over time.
struct schedule_trace {
  /// Memory of the device: a piece per compute step on the device, per wait, and (without duration) per copy to the device. For a
  /// cyclic schedule, the pieces of one period.
  memory_timeline memory;
  /// The device first, then the other tiers that compute, then the streams in the order of the links. The device waits whenever
  /// it does not compute.
  std::vector<lane> lanes;
  /// The tiers beyond the device that hold anything. The order is that of the schedule, the clock that of the device: the bytes
  /// of a copy count from the time at which the step issues it.
  std::vector<tier_memory> tiers;
};

namespace detail {

/// The walk behind `trace`, to be made once.
class tracer {
 public:
  tracer(const problem& p, const schedule& s)
      : p_(p), s_(s), e_(evaluate(p, s)), present_(p), has_run_(p.operations().size(), false) {
    t_.memory = {.pieces = {}, .seconds = e_.seconds, .held = p.held_bytes(), .peak = e_.peak};
    for (const auto& [v, tier] : s.starts)
      if (tier == device_tier && p.values()[v].held) t_.memory.held += p.values()[v].bytes;
    computations(device_tier);
    for (const auto& o : p.operations()) computations(o.on);
    streams_ = t_.lanes.size();
    for (const auto& l : p.links()) copies(l);
    for (std::size_t t = 0; t < p.tiers().size(); ++t)
      t_.tiers.push_back({p.tiers()[t].name, p.tiers()[t].budget, e_.peaks[t], {{0, 0}}});
    for (value_id v = 0; v < p.values().size(); ++v)
      if (p.is_source(v) && p.values()[v].starts != any_tier) set_present(v, p.values()[v].starts, true);
    for (const auto& [v, t] : s.starts) set_present(v, t, true);
  }

  schedule_trace run() {
    for (std::size_t k = 0; k < s_.steps.size(); ++k) {
      const auto x = with_tiers(p_, s_.steps[k]);
      if (x.what == action::compute)
        compute(x.operation(), e_.ends[k], e_.memory[k]);
      else
        copy_or_drop(x, e_.ends[k]);
    }
    wait_until(e_.seconds);
    for (auto& t : t_.tiers) t.points.emplace_back(e_.seconds, t.points.back().second);
    t_.tiers.erase(t_.tiers.begin());
    std::erase_if(t_.tiers, [](const tier_memory& t) { return t.peak == 0; });
    return std::move(t_);
  }

 private:
  /// @param from index of the first lane to look at, because a stream may have the name of a tier
  lane& lane_of(const std::string& label, std::size_t from) {
    const auto found = std::find_if(t_.lanes.begin() + static_cast<std::ptrdiff_t>(from), t_.lanes.end(),
                                    [&](const lane& l) { return l.label == label; });
    return found != t_.lanes.end() ? *found : t_.lanes.emplace_back(lane{label, {}});
  }
  lane& computations(tier_id t) { return lane_of(p_.tiers()[t].name, 0); }
  lane& copies(const copy_link& l) { return lane_of(p_.plain() ? "to " + p_.tiers()[l.to].name : l.stream, streams_); }
  void add_span(lane& to, double begin, double end, lane::work what) {
    const double period = e_.seconds;
    while (!p_.next().empty() && period > 0 && begin >= period) begin -= period, end -= period;
    if (!p_.next().empty() && end > period) {  // continues in the next step
      if (begin > 0) to.spans.push_back({0, std::min(end - period, begin), what});
      end = period;
    }
    if (end > begin) to.spans.push_back({begin, end, what});
  }

  bytes_t live() const { return t_.tiers[device_tier].points.back().second; }
  void add(tier_id t, bytes_t bytes) {
    auto& points = t_.tiers[t].points;
    points.emplace_back(now_, points.back().second + bytes);
  }
  void set_present(value_id v, tier_id t, bool present) {
    if (std::exchange(present_(v, t), present) != present) add(t, present ? p_.values()[v].bytes : -p_.values()[v].bytes);
  }

  void wait_until(double time) {
    if (time <= now_ + 1e-9 * e_.seconds) return;  // a rounding error is no wait
    t_.memory.pieces.push_back({now_, time, live(), false, none});
    add_span(t_.lanes[0], now_, time, lane::work::waited);
    now_ = time;
  }
  void compute(operation_id which, double end, bytes_t memory) {
    const auto& o = p_.operations()[which];
    const double begin = end - o.seconds;
    const bool recomputed = has_run_[which];
    has_run_[which] = true;
    if (o.on == device_tier) {
      wait_until(begin);
      t_.memory.pieces.push_back({now_, end, memory, recomputed, which});
      now_ = end;
    }
    add_span(computations(o.on), begin, end, recomputed ? lane::work::recomputed : lane::work::computed);
    bytes_t extra = o.workspace;  // an output that is already there needs its bytes twice
    for (auto v : o.outputs) extra += present_(v, o.on) ? p_.values()[v].bytes : 0;
    for (const auto& w : o.overwrites) set_present(w.input, o.on, false);
    for (auto v : o.outputs) set_present(v, o.on, true);
    if (extra > 0) add(o.on, extra), add(o.on, -extra);
  }
  /// A copy or a drop.
  void copy_or_drop(const step& x, double time) {
    wait_until(time);
    const bool copy = x.what == action::copy;
    set_present(x.value(), copy ? x.to : x.from, copy);
    if (!copy) return;
    const auto& c = e_.copies[next_copy_++];
    add_span(copies(*p_.link(x.from, x.to)), c.begin, c.end, lane::work::copied);
    if (x.to == device_tier) t_.memory.pieces.push_back({now_, now_, live(), false, none});
  }

  const problem& p_;
  const schedule& s_;
  const evaluation e_;
  schedule_trace t_;
  std::size_t streams_ = 0;            // index of the first lane of a stream
  tier_table<unsigned char> present_;  // by value and tier
  std::vector<bool> has_run_;
  std::size_t next_copy_ = 0;
  double now_ = 0;  // clock of the device, s
};

}  // namespace detail

/// Computes what a schedule does over time.
/// @param p the problem
/// @param s a valid schedule of it
/// @throws bad_schedule if `s` is not valid
/// Complexity: that of `evaluate`.
/// @code
/// const auto t = remat::trace(p, s);
/// std::cout << remat::timeline_svg(t.memory, {.lanes = t.lanes, .tiers = t.tiers});
/// @endcode
inline schedule_trace trace(const problem& p, const schedule& s) { return detail::tracer(p, s).run(); }

}  // namespace remat
