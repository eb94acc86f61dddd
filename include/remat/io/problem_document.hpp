// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exchange format remat-problem, versions 1 and 2. Needs nlohmann/json; not part of the umbrella header.
#pragma once

#include <cstddef>
#include <filesystem>
#include <initializer_list>
#include <istream>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/io/document.hpp>
#include <remat/io/file.hpp>

namespace remat {

/// Members of a remat-problem that the library does not know.
struct unknown_problem_members {
  nlohmann::ordered_json document = nlohmann::ordered_json::object();
  nlohmann::ordered_json offload = nlohmann::ordered_json::object();
  std::vector<nlohmann::ordered_json> values;      ///< by index of the value; may be shorter
  std::vector<nlohmann::ordered_json> operations;  ///< by index of the operation; may be shorter
  std::vector<nlohmann::ordered_json> tiers;       ///< by index of the tier; may be shorter
  std::vector<nlohmann::ordered_json> links;       ///< by index of the link, without the links of `offload`; may be shorter
};

/// A remat-problem as read.
struct problem_document {
  remat::problem problem;
  unknown_problem_members unknown;
};

/// The origin of operations: the optional members `module` and `source` of an operation in a document. Planning does not need
/// them. Reports group operations by them.
struct operation_labels {
  std::vector<std::string> modules;  ///< path of the module that calls the operation, such as "layers.3.mlp", or empty
  std::vector<std::string> sources;  ///< line of the user's code that calls the operation, such as "model.py:41", or empty
};

/// The labels of a document, one per operation.
/// @throws bad_document naming a label that is not a string
inline operation_labels labels_of(const problem_document& d) {
  operation_labels labels;
  for (std::size_t o = 0; o < d.unknown.operations.size(); ++o) {
    const std::string place = "operations[" + std::to_string(o) + "]";
    const detail::members x(d.unknown.operations[o], place);
    labels.modules.push_back(x.text("module", ""));
    labels.sources.push_back(x.text("source", ""));
  }
  return labels;
}

namespace detail {

/// The tier that member `key` names.
/// @param otherwise the tier if there is no such member
/// @param any       true if the name "any" is allowed; it gives `any_tier`
inline tier_id tier_of(const members& m, const char* key, const memory_system& system, tier_id otherwise, bool any = false) {
  if (!m.has(key)) return otherwise;
  const auto name = m.text(key, "");
  const auto t = system.find(name);
  if (t == any_tier && !(any && name == "any")) throw bad_problem(m.where(key) + ": no tier " + m.at(key).dump());
  return t;
}

/// The tiers and links of a document of version 2.
inline memory_system read_system(const members& document, unknown_problem_members& unknown) {
  memory_system system;
  if (document.has("tiers")) {
    for (const auto& x : document.array("tiers")) {
      const members t(x, at_index("tiers", system.tiers.size()));
      auto& next = system.tiers.emplace_back(tier{t.text("name", "")});
      if (t.has("budget") && !t.at("budget").is_null()) next.budget = t.integer("budget");
      unknown.tiers.push_back(t.except({"name", "budget"}));
    }
    if (system.tiers.empty()) throw bad_problem("tiers: none, not even the device");
  }
  system.validate();
  if (!document.has("links")) return system;
  for (const auto& x : document.array("links")) {
    const members l(x, at_index("links", system.links.size()));
    for (const auto* end : {"from", "to"}) l.at(end);
    system.links.push_back({tier_of(l, "from", system, any_tier), tier_of(l, "to", system, any_tier), l.number("rate"),
                            l.number("latency", 0.0), l.text("stream", "")});
    unknown.links.push_back(l.except({"from", "to", "rate", "latency", "stream"}));
  }
  return system;
}

inline problem_document problem_from(const json& root) {
  const members document(root, "");
  const bool version_2 = document.version("remat-problem", 2) == 2;
  using names = std::initializer_list<std::string_view>;
  const auto unknown = [&](const members& m, names known, names known_in_version_2) {
    auto rest = m.except(known);
    if (version_2)
      for (auto name : known_in_version_2) rest.erase(std::string(name));
    return rest;
  };

  problem_document d;
  d.unknown.document =
      unknown(document, {"format", "version", "name", "values", "operations", "targets", "offload", "backward_start"},
              {"tiers", "links", "next"});
  memory_system system;
  if (version_2) system = read_system(document, d.unknown);
  std::vector<value> values;
  for (const auto& x : document.array("values")) {
    const members v(x, at_index("values", values.size()));
    values.push_back({.name = v.text("name", ""),
                      .bytes = v.integer("bytes"),
                      .held = v.boolean("held", false),
                      .movable = v.boolean("movable", true)});
    if (version_2) {
      values.back().starts = tier_of(v, "starts", system, device_tier, true);
      values.back().ends = tier_of(v, "ends", system, device_tier, true);
    }
    d.unknown.values.push_back(unknown(v, {"name", "bytes", "held", "movable"}, {"starts", "ends"}));
  }
  std::vector<operation> operations;
  for (const auto& x : document.array("operations")) {
    const members o(x, at_index("operations", operations.size()));
    operations.push_back({.name = o.text("name", ""),
                          .inputs = o.indices("inputs", values.size()),
                          .outputs = o.indices("outputs", values.size()),
                          .seconds = o.number("seconds"),
                          .workspace = o.integer("workspace", 0),
                          .once = o.boolean("once", false),
                          .kind = o.text("kind", "")});
    if (version_2) {
      operations.back().on = tier_of(o, "on", system, device_tier);
      if (o.has("overwrites"))
        for (auto [output, input] : o.pairs("overwrites", values.size())) operations.back().overwrites.push_back({output, input});
    }
    d.unknown.operations.push_back(
        unknown(o, {"name", "inputs", "outputs", "seconds", "workspace", "once", "kind"}, {"on", "overwrites"}));
  }
  auto targets = document.indices("targets", values.size());
  std::vector<carry> next;
  if (version_2 && document.has("next"))
    for (auto [target, source] : document.pairs("next", values.size())) next.push_back({target, source});
  std::optional<copy_rates> copies;
  if (document.has("offload")) {
    const members offload(document.at("offload"), "offload");
    copies = copy_rates{.to_host = offload.number("to_host"),
                        .to_device = offload.number("to_device"),
                        .latency = offload.number("latency", 0.0)};
    d.unknown.offload = offload.except({"to_host", "to_device", "latency"});
  }
  std::optional<operation_id> backward;
  if (document.has("backward_start")) backward = document.index("backward_start", operations.size(), "operation");
  d.problem = problem(document.text("name", ""), std::move(values), std::move(operations), std::move(targets), copies, backward,
                      std::move(system), std::move(next));
  return d;
}

}  // namespace detail

/// Reads a remat-problem, and keeps the members that the library does not know. In a document of version 1, the members of
/// version 2 count as unknown.
/// @param in the text
/// @param l  limits on the document
/// @return the problem and its unknown members
/// @throws bad_document if the text is not a remat-problem: truncated, another format or version, a missing, repeated or
///         mistyped member, an integer beyond 64 bits, a limit exceeded; bad_problem if the problem of the document is not valid
/// Complexity: O(length of the text).
inline problem_document read_problem_document(std::istream& in, const document_limits& l = {}) {
  return detail::problem_from(detail::parse(read_text(in, l.bytes), l));
}

/// As above, from a file. Messages begin with the name of the file.
inline problem_document read_problem_document(const std::filesystem::path& path, const document_limits& l = {}) {
  return detail::read_named(path, l,
                            [](std::istream& in, const document_limits& bounds) { return read_problem_document(in, bounds); });
}

/// Reads a remat-problem without its unknown members. Otherwise as `read_problem_document`.
/// @code
/// const remat::problem p = remat::read_problem("resnet18.json");
/// @endcode
inline problem read_problem(std::istream& in, const document_limits& l = {}) { return read_problem_document(in, l).problem; }
inline problem read_problem(const std::filesystem::path& path, const document_limits& l = {}) {
  return read_problem_document(path, l).problem;
}

/// Writes a remat-problem: version 1 if the problem is plain, otherwise version 2.
/// @param out     the stream
/// @param p       the problem
/// @param unknown more members to write, from `read_problem_document`
/// @throws bad_document if a name is not valid UTF-8
inline void write_problem(std::ostream& out, const problem& p, const unknown_problem_members& unknown = {}) {
  using detail::json;
  const auto name = [&](tier_id t) { return t == any_tier ? "any" : p.tiers()[t].name; };
  const auto add_unknown = [](json& to, const std::vector<json>& all, std::size_t i) {
    if (i < all.size()) to.update(all[i]);
  };
  json document = {{"format", "remat-problem"}, {"version", p.plain() ? 1 : 2}, {"name", p.name()}};
  if (!p.plain()) {
    document["tiers"] = json::array();
    for (std::size_t i = 0; i < p.tiers().size(); ++i) {
      json x = {{"name", p.tiers()[i].name}};
      if (p.tiers()[i].budget) x["budget"] = *p.tiers()[i].budget;
      add_unknown(x, unknown.tiers, i);
      document["tiers"].push_back(std::move(x));
    }
    document["links"] = json::array();
    const auto links = p.links().subspan(p.copies() ? 2 : 0);  // "offload" has those of `copies`
    for (std::size_t i = 0; i < links.size(); ++i) {
      const auto& l = links[i];
      json x = {{"from", name(l.from)}, {"to", name(l.to)}, {"rate", l.rate}, {"latency", l.latency}, {"stream", l.stream}};
      add_unknown(x, unknown.links, i);
      document["links"].push_back(std::move(x));
    }
  }
  document["values"] = json::array();
  for (std::size_t i = 0; i < p.values().size(); ++i) {
    const auto& v = p.values()[i];
    json x = {{"name", v.name}, {"bytes", v.bytes}};
    if (v.held) x["held"] = true;
    if (!v.movable) x["movable"] = false;
    if (v.starts != device_tier) x["starts"] = name(v.starts);
    if (v.ends != device_tier) x["ends"] = name(v.ends);
    add_unknown(x, unknown.values, i);
    document["values"].push_back(std::move(x));
  }
  document["operations"] = json::array();
  for (std::size_t i = 0; i < p.operations().size(); ++i) {
    const auto& o = p.operations()[i];
    json x = {{"name", o.name}, {"inputs", o.inputs}, {"outputs", o.outputs}, {"seconds", o.seconds}};
    if (o.workspace) x["workspace"] = o.workspace;
    if (o.once) x["once"] = true;
    if (!o.kind.empty()) x["kind"] = o.kind;
    if (o.on != device_tier) x["on"] = name(o.on);
    for (const auto& w : o.overwrites) x["overwrites"].push_back({w.output, w.input});
    add_unknown(x, unknown.operations, i);
    document["operations"].push_back(std::move(x));
  }
  document["targets"] = p.targets();
  for (const auto& c : p.next()) document["next"].push_back({c.target, c.source});
  if (p.backward_start()) document["backward_start"] = *p.backward_start();
  if (const auto& c = p.copies()) {
    document["offload"] = {{"to_host", c->to_host}, {"to_device", c->to_device}, {"latency", c->latency}};
    document["offload"].update(unknown.offload);
  }
  document.update(unknown.document);
  out << detail::dump(document);
}

/// As above, to a file, which is replaced atomically.
/// @throws error if the file cannot be written
inline void write_problem(const std::filesystem::path& path, const problem& p, const unknown_problem_members& unknown = {}) {
  write_file(path, [&](std::ostream& out) { write_problem(out, p, unknown); });
}

}  // namespace remat
