// SPDX-License-Identifier: Apache-2.0
/// @file
/// A schedule as a trace for chrome://tracing and Perfetto. Needs nlohmann/json; not part of the umbrella header.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/trace.hpp>
#include <remat/io/json.hpp>

namespace remat {

/// Draws a schedule as a trace with lanes. A plain problem has up to three lanes: computations, copies to the host, copies to the
/// device. A problem with more tiers has a lane for the computations on each tier and a lane for each stream of copies. The
/// memory of each tier is a counter track. An arrow leads from each copy to its first use, which is the computation or the next
/// copy that reads the copied value.
/// @param p the problem
/// @param s a valid schedule of the problem
/// @return a document in the Trace Event Format, in microseconds. The first run of an operation has the category `computed`,
///         later runs have the category `recomputed`.
/// @throws bad_schedule if `s` is not valid; bad_document if a name is not valid UTF-8
/// Complexity: O(values + edges executed).
///
/// Reference: "Trace Event Format", Chromium project.
/// @code
/// remat::write_file("plan.trace.json", remat::chrome_trace(p, r.schedule));
/// @endcode
inline std::string chrome_trace(const problem& p, const schedule& s) {
  using json = nlohmann::ordered_json;
  const auto e = evaluate(p, s);
  auto events = json::array();
  const auto add = [&](const char* phase, const std::string& name, double time, const json& members) {
    json event = {{"ph", phase}, {"name", name}, {"pid", 1}, {"ts", time * 1e6}};
    event.update(members);
    events.push_back(std::move(event));
  };
  const auto merged = [](json members, const json& more) {
    members.update(more);
    return members;
  };
  const auto memory = [&](double time, bytes_t bytes) { add("C", "memory", time, {{"args", {{"bytes", bytes}}}}); };
  const auto span = [&](std::size_t lane_number, const std::string& name, const std::string& category, double begin, double end,
                        json about) {
    add("X", name, begin, {{"tid", lane_number}, {"dur", (end - begin) * 1e6}, {"cat", category}, {"args", std::move(about)}});
  };
  add("M", "process_name", 0, {{"args", {{"name", p.name()}}}});
  std::vector<std::string> lanes;  // numbered from 1, in the order of first use
  const auto lane = [&](const std::string& name) {
    const auto number = static_cast<std::size_t>(std::find(lanes.begin(), lanes.end(), name) - lanes.begin()) + 1;
    if (number <= lanes.size()) return number;
    lanes.push_back(name);
    add("M", "thread_name", 0, {{"tid", number}, {"args", {{"name", name}}}});
    return number;
  };
  const auto computations = [&](tier_id t) {
    return lane(t == device_tier ? "computations" : "computations on the " + p.tiers()[t].name);
  };
  const auto copies = [&](const copy_link& l) {
    return lane(p.plain() ? "copies to the " + p.tiers()[l.to].name : "copies on " + l.stream);
  };
  computations(device_tier);
  for (const auto& o : p.operations()) computations(o.on);
  for (const auto& l : p.links()) copies(l);

  auto start_bytes = p.source_bytes();
  for (const auto& [v, t] : s.starts)
    if (t == device_tier) start_bytes += p.values()[v].bytes;
  memory(0, start_bytes);
  for (const auto& t : trace(p, s).tiers)
    for (const auto& [time, bytes] : t.points) add("C", "memory of the " + t.label, time, {{"args", {{"bytes", bytes}}}});

  struct arrow {
    std::size_t lane;
    double time;  ///< middle of the copy, s: an arrow starts inside a span
  };
  std::map<std::pair<value_id, tier_id>, arrow> unread_copies;  // copies whose value has not been read yet
  std::size_t arrows = 0;
  const auto draw_arrow_to = [&](value_id v, tier_id t, std::size_t lane_number, double time) {
    const auto origin = unread_copies.find({v, t});
    if (origin == unread_copies.end()) return;
    const json about = {{"cat", "copy"}, {"id", ++arrows}};
    const auto& name = p.values()[v].name;
    add("s", name, origin->second.time, merged(about, {{"tid", origin->second.lane}}));
    add("f", name, time, merged(about, {{"tid", lane_number}, {"bp", "e"}}));
    unread_copies.erase(origin);
  };

  std::vector<bool> has_run(p.operations().size(), false);
  for (std::size_t k = 0, next_copy = 0; k < s.steps.size(); ++k) {
    const auto x = detail::with_tiers(p, s.steps[k]);
    const json about = {{"step", k}, {"bytes", e.memory[k]}};
    if (x.what == action::compute) {
      const auto& op = p.operations()[x.operation()];
      const double begin = e.ends[k] - op.seconds;
      span(computations(op.on), op.name, has_run[x.operation()] ? "recomputed" : "computed", begin, e.ends[k], about);
      has_run[x.operation()] = true;
      if (op.on == device_tier) memory(begin, e.memory[k]);
      for (auto v : op.inputs) draw_arrow_to(v, op.on, computations(op.on), begin);
      continue;
    }
    memory(e.ends[k], e.memory[k]);
    if (x.what == action::drop) {
      unread_copies.erase({x.value(), x.from});
      continue;
    }
    const auto& c = e.copies[next_copy++];
    const auto lane_number = copies(*p.link(x.from, x.to));
    span(lane_number, p.values()[x.value()].name, std::string(to_string(s.steps[k].what)), c.begin, c.end, about);
    draw_arrow_to(x.value(), x.from, lane_number, c.begin);
    unread_copies[{x.value(), x.to}] = {lane_number, (c.begin + c.end) / 2};
  }
  return detail::dump({{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}});
}

}  // namespace remat
