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
  const auto add = [&](const char* phase, const std::string& name, double at, const json& members) {
    json event = {{"ph", phase}, {"name", name}, {"pid", 1}, {"ts", at * 1e6}};
    event.update(members);
    events.push_back(std::move(event));
  };
  const auto merged = [](json members, const json& more) {
    members.update(more);
    return members;
  };
  const auto memory = [&](double at, bytes_t bytes) { add("C", "memory", at, {{"args", {{"bytes", bytes}}}}); };
  const auto span = [&](std::size_t on, const std::string& name, const std::string& category, double begin, double end,
                        json about) {
    add("X", name, begin, {{"tid", on}, {"dur", (end - begin) * 1e6}, {"cat", category}, {"args", std::move(about)}});
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

  auto at_first = p.source_bytes();
  for (const auto& [v, t] : s.starts)
    if (t == device_tier) at_first += p.values()[v].bytes;
  memory(0, at_first);
  for (const auto& t : trace(p, s).tiers)
    for (const auto& [at, bytes] : t.points) add("C", "memory of the " + t.label, at, {{"args", {{"bytes", bytes}}}});

  struct arrow {
    std::size_t lane;
    double at;  ///< middle of the copy, s: an arrow starts inside a span
  };
  std::map<std::pair<value_id, tier_id>, arrow> unused;  // copies whose value has not been read yet
  std::size_t arrows = 0;
  const auto lead_to = [&](value_id v, tier_id t, std::size_t on, double at) {
    const auto origin = unused.find({v, t});
    if (origin == unused.end()) return;
    const json about = {{"cat", "copy"}, {"id", ++arrows}};
    const auto& name = p.values()[v].name;
    add("s", name, origin->second.at, merged(about, {{"tid", origin->second.lane}}));
    add("f", name, at, merged(about, {{"tid", on}, {"bp", "e"}}));
    unused.erase(origin);
  };

  std::vector<bool> has_run(p.operations().size(), false);
  for (std::size_t at = 0, copied = 0; at < s.steps.size(); ++at) {
    const auto x = detail::with_tiers(p, s.steps[at]);
    const json about = {{"step", at}, {"bytes", e.memory[at]}};
    if (x.what == action::compute) {
      const auto& op = p.operations()[x.operation()];
      const double begin = e.ends[at] - op.seconds;
      span(computations(op.on), op.name, has_run[x.operation()] ? "recomputed" : "computed", begin, e.ends[at], about);
      has_run[x.operation()] = true;
      if (op.on == device_tier) memory(begin, e.memory[at]);
      for (auto v : op.inputs) lead_to(v, op.on, computations(op.on), begin);
      continue;
    }
    memory(e.ends[at], e.memory[at]);
    if (x.what == action::drop) {
      unused.erase({x.value(), x.from});
      continue;
    }
    const auto& c = e.copies[copied++];
    const auto on = copies(*p.link(x.from, x.to));
    span(on, p.values()[x.value()].name, std::string(to_string(s.steps[at].what)), c.begin, c.end, about);
    lead_to(x.value(), x.from, on, c.begin);
    unused[{x.value(), x.to}] = {on, (c.begin + c.end) / 2};
  }
  return detail::dump({{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}});
}

}  // namespace remat
