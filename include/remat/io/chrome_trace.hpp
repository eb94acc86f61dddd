// SPDX-License-Identifier: Apache-2.0
/// @file
/// A schedule as a trace for chrome://tracing and Perfetto. Needs nlohmann/json; not part of the umbrella header.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/io/json.hpp>

namespace remat {

/// Draws a schedule on three lanes (computations, copies to the host, copies to the device), with memory as a counter.
/// @param p the problem
/// @param s a valid schedule of it
/// @return a document in the Trace Event Format, in microseconds; computations beyond the first of an operation are in the
/// category
///         `recomputed`
/// @throws as `evaluate_plain`; bad_document if a name is not valid UTF-8
/// Complexity: O(values + edges executed).
///
/// Reference: "Trace Event Format", Chromium project.
/// @code
/// remat::write_file("plan.trace.json", remat::chrome_trace(p, r.schedule));
/// @endcode
inline std::string chrome_trace(const problem& p, const schedule& s) {
  using json = nlohmann::ordered_json;
  const auto e = evaluate_plain(p, s);
  auto events = json::array();
  enum lane { computations = 1, to_host, to_device };
  const auto add = [&](const char* phase, const std::string& name, double at, const json& members) {
    json event = {{"ph", phase}, {"name", name}, {"pid", 1}, {"ts", at * 1e6}};
    event.update(members);
    events.push_back(std::move(event));
  };
  const auto memory = [&](double at, bytes_t bytes) { add("C", "memory", at, {{"args", {{"bytes", bytes}}}}); };
  const auto span = [&](lane on, const std::string& name, const std::string& category, double begin, double end, json about) {
    add("X", name, begin, {{"tid", on}, {"dur", (end - begin) * 1e6}, {"cat", category}, {"args", std::move(about)}});
  };
  add("M", "process_name", 0, {{"args", {{"name", p.name()}}}});
  for (const auto& [on, name] :
       {std::pair{computations, "computations"}, {to_host, "copies to the host"}, {to_device, "copies to the device"}})
    if (on == computations || p.copies()) add("M", "thread_name", 0, {{"tid", on}, {"args", {{"name", name}}}});

  memory(0, p.source_bytes());
  std::vector<bool> has_run(p.operations().size(), false);
  for (std::size_t at = 0, copies = 0; at < s.steps.size(); ++at) {
    const auto& x = s.steps[at];
    const json about = {{"step", at}, {"bytes", e.memory[at]}};
    if (x.what == action::compute) {
      const auto& op = p.operations()[x.operation()];
      const double begin = e.ends[at] - op.seconds;
      span(computations, op.name, has_run[x.operation()] ? "recomputed" : "computed", begin, e.ends[at], about);
      has_run[x.operation()] = true;
      memory(begin, e.memory[at]);
      continue;
    }
    memory(e.ends[at], e.memory[at]);
    if (x.what == action::drop) continue;
    const auto& c = e.copies[copies++];
    span(x.what == action::offload ? to_host : to_device, p.values()[x.value()].name, std::string(to_string(x.what)), c.begin,
         c.end, about);
  }
  return detail::dump({{"displayTimeUnit", "ms"}, {"traceEvents", std::move(events)}});
}

}  // namespace remat
