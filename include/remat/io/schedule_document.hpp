// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exchange format remat-schedule, versions 1 and 2. Needs nlohmann/json; not part of the umbrella header.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <istream>
#include <iterator>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/io/document.hpp>
#include <remat/io/file.hpp>

namespace remat {

/// A remat-schedule as read. The numbers in `result` are claims of its writer; call `evaluate` to check them.
struct schedule_document {
  std::string problem;  ///< name of its problem
  remat::result result;
  nlohmann::ordered_json unknown = nlohmann::ordered_json::object();
};

namespace detail {

/// Reads the steps of a remat-schedule one by one.
class step_reader {
 public:
  step_reader(const memory_system& system, bool version_2) : system_(system), version_2_(version_2) {}

  /// @throws bad_document for an entry that is not a step; bad_schedule for a step that is valid for no problem
  step read(const json& x, std::size_t step_index) {
    step_index_ = step_index;
    const bool well_formed = x.is_array() && x.size() >= 2 && x[0].is_string() && x[1].is_number_integer() &&
                             (version_2_ || x.size() == 2) &&
                             std::all_of(x.begin() + 2, x.end(), [](const json& name) { return name.is_string(); });
    if (!well_formed)
      throw bad_document(at_index("steps", step_index) + ": not an action and an index" +
                         (version_2_ ? ", or tiers after them" : ""));
    const auto& name = x[0].get_ref<const std::string&>();
    const auto found = std::find(std::begin(action_names), std::end(action_names), name);
    const auto what = static_cast<action>(found - std::begin(action_names));
    if (found == std::end(action_names) || (what == action::copy && !version_2_)) refuse(x, x[0].dump(), "no such action");
    if (!x[1].is_number_unsigned() || x[1].get<std::uint64_t>() >= none)
      refuse(x, name, what == action::compute ? "no such operation" : "no such value");
    const std::size_t tiers = what == action::copy ? 2 : what == action::drop && x.size() > 2 ? 1 : 0;
    if (x.size() != 2 + tiers) refuse(x, name, tiers == 2 ? "a copy goes from one tier to another" : "too many tiers");
    step next(what, x[1].get<index_t>());
    if (tiers > 0) next.from = tier(x, 2);
    if (tiers > 1) next.to = tier(x, 3);
    return next;
  }

 private:
  [[noreturn]] void refuse(const json& x, const std::string& step_name, const std::string& why) const {
    throw bad_schedule(step_index_, "step " + std::to_string(step_index_) + " (" + step_name + " " + x[1].dump() + "): " + why);
  }
  tier_id tier(const json& x, std::size_t i) const {
    const auto t = system_.find(x[i].get_ref<const std::string&>());
    if (t == any_tier) refuse(x, x[0].get<std::string>(), "no tier " + x[i].dump());
    return t;
  }

  const memory_system& system_;
  bool version_2_;
  std::size_t step_index_ = 0;
};

inline schedule_document schedule_from(const json& root, memory_system system) {
  const members document(root, "");
  const bool version_2 = document.version("remat-schedule", 2) == 2;
  system.validate();

  schedule_document d;
  auto& r = d.result;
  d.problem = document.text("problem", "");
  r.solver = document.text("solver", "");
  r.budget = document.integer("budget", 0);
  r.peak = document.integer("peak", 0);
  r.seconds = document.number("seconds", 0.0);
  r.bound = document.number("bound", 0.0);
  const auto name = document.text("status", "feasible");
  const auto known = std::find(status_names.begin(), status_names.end(), name);
  if (known == status_names.end()) document.fail("status", "unknown: " + json(name).dump());
  r.status = static_cast<status>(known - status_names.begin());
  r.reason = document.text("reason", "");

  step_reader reader(system, version_2);
  auto& steps = r.schedule.steps;
  for (const auto& x : document.array("steps")) steps.push_back(reader.read(x, steps.size()));
  d.unknown = document.except(
      {"format", "version", "problem", "status", "reason", "budget", "peak", "seconds", "bound", "solver", "steps"});
  if (!version_2) return d;

  d.unknown.erase("starts");
  d.unknown.erase("peaks");
  if (document.has("starts"))
    for (const auto& x : document.array("starts")) {
      const auto place = at_index("starts", r.schedule.starts.size());
      if (!x.is_array() || x.size() != 2 || !x[0].is_number_unsigned() || !x[1].is_string())
        throw bad_document(place + ": not the index of a value and a tier");
      const auto t = system.find(x[1].get<std::string>());
      if (x[0].get<std::uint64_t>() >= none) throw bad_schedule(0, place + ": no value " + x[0].dump());
      if (t == any_tier) throw bad_schedule(0, place + ": no tier " + x[1].dump());
      r.schedule.starts.push_back({x[0].get<index_t>(), t});
    }
  if (document.has("peaks")) {
    const members peaks(document.at("peaks"), "peaks");
    for (const auto& t : system.tiers) r.peaks.push_back(peaks.integer(t.name.c_str(), 0));
  }
  return d;
}

inline void write_schedule(std::ostream& out, const result& r, std::string_view problem, memory_system system, bool plain,
                           const json& unknown) {
  system.validate();
  const auto& s = r.schedule;
  const auto name = [&](tier_id t) -> const std::string& {
    if (t >= system.tiers.size()) throw bad_document("the schedule names a tier that is not one of the problem");
    return system.tiers[t].name;
  };
  plain = plain && s.plain();
  json document = {{"format", "remat-schedule"},    {"version", plain ? 1 : 2}, {"problem", problem},
                   {"status", to_string(r.status)}, {"budget", r.budget},       {"peak", r.peak},
                   {"seconds", r.seconds},          {"bound", r.bound},         {"solver", r.solver},
                   {"steps", json::array()}};
  if (!r.reason.empty()) document["reason"] = r.reason;
  for (const auto& x : s.steps) {
    json step = {to_string(x.what), x.which};
    if (!x.plain()) step.push_back(name(x.from));
    if (x.what == action::copy) step.push_back(name(x.to));
    document["steps"].push_back(std::move(step));
  }
  for (const auto& [v, t] : s.starts) document["starts"].push_back({v, name(t)});
  if (!plain && r.peaks.size() == system.tiers.size())
    for (tier_id t = 0; t < r.peaks.size(); ++t) document["peaks"][name(t)] = r.peaks[t];
  document.update(unknown);
  out << dump(document);
}

}  // namespace detail

/// Reads a remat-schedule for a problem. Besides format and version, only `steps` is required.
/// @param in the text
/// @param p  the problem, which defines the tiers
/// @param l  limits on the document
/// @return the content of the document; call `evaluate` to check that the schedule is valid for the problem
/// @throws bad_document as `read_problem_document`; bad_schedule for a step that is valid for no problem: an unknown action or
///         tier, an index that is negative or above 2^32 - 2
/// Complexity: O(length of the text).
inline schedule_document read_schedule(std::istream& in, const problem& p, const document_limits& l = {}) {
  return detail::schedule_from(detail::parse(read_text(in, l.bytes), l), {p.tiers(), {}});
}

/// As above without a problem: the tiers are a device and a host, and other tiers are errors.
inline schedule_document read_schedule(std::istream& in, const document_limits& l = {}) {
  return detail::schedule_from(detail::parse(read_text(in, l.bytes), l), {});
}

/// As above, from a file. Messages begin with the name of the file.
inline schedule_document read_schedule(const std::filesystem::path& path, const problem& p, const document_limits& l = {}) {
  return detail::read_named(path, l,
                            [&](std::istream& in, const document_limits& bounds) { return read_schedule(in, p, bounds); });
}
inline schedule_document read_schedule(const std::filesystem::path& path, const document_limits& l = {}) {
  return detail::read_named(path, l, [](std::istream& in, const document_limits& bounds) { return read_schedule(in, bounds); });
}

/// Writes a remat-schedule: version 1 if the schedule and its problem are plain, otherwise version 2.
/// @param out     the stream
/// @param r       result of a solver
/// @param p       its problem
/// @param unknown more members to write, from `read_schedule`
/// @throws bad_document if a name is not valid UTF-8, or the schedule names a tier that the problem does not have
inline void write_schedule(std::ostream& out, const result& r, const problem& p,
                           const nlohmann::ordered_json& unknown = nlohmann::ordered_json::object()) {
  detail::write_schedule(out, r, p.name(), {p.tiers(), {}}, p.plain(), unknown);
}

/// As above, for a problem named `problem` whose tiers are a device and a host.
inline void write_schedule(std::ostream& out, const result& r, std::string_view problem,
                           const nlohmann::ordered_json& unknown = nlohmann::ordered_json::object()) {
  detail::write_schedule(out, r, problem, {}, true, unknown);
}

/// As above, to a file, which is replaced atomically.
/// @param problem the problem, or its name
/// @throws error if the file cannot be written
template <class Problem>
void write_schedule(const std::filesystem::path& path, const result& r, const Problem& problem,
                    const nlohmann::ordered_json& unknown = nlohmann::ordered_json::object()) {
  write_file(path, [&](std::ostream& out) { write_schedule(out, r, problem, unknown); });
}

}  // namespace remat
