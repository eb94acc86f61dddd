// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exchange formats remat-problem and remat-schedule, version 1. Needs nlohmann/json; not part of the umbrella header.
///
/// Reading trusts nothing: length, nesting and number of members are bounded, and whatever is wrong ends in an exception that
/// names the member and its index. Members that the library does not know are kept for writing back, and otherwise ignored.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <istream>
#include <iterator>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/io/file.hpp>

namespace remat {

/// Bounds on what a reader accepts.
struct document_limits {
  std::size_t bytes = std::size_t{256} << 20;  ///< length of the text
  std::size_t depth = 64;                      ///< nesting of arrays and objects
  std::size_t members = 1024;                  ///< members of one object
};

/// Members of a remat-problem that the library does not know.
struct unknown_problem_members {
  nlohmann::ordered_json document = nlohmann::ordered_json::object();
  nlohmann::ordered_json offload = nlohmann::ordered_json::object();
  std::vector<nlohmann::ordered_json> values;      ///< by index of the value; may be shorter
  std::vector<nlohmann::ordered_json> operations;  ///< by index of the operation; may be shorter
};

/// A remat-problem as read.
struct problem_document {
  remat::problem problem;
  unknown_problem_members unknown;
};

/// A remat-schedule as read. The numbers in `result` are claims of whoever wrote it; `evaluate` has the truth.
struct schedule_document {
  std::string problem;  ///< name of the problem it was made for
  remat::result result;
  nlohmann::ordered_json unknown = nlohmann::ordered_json::object();
};

/// For nlohmann-json. @tparam Json a basic_json
template <class Json, class Kind>
void to_json(Json& j, const id<Kind>& i) {
  j = static_cast<index_t>(i);
}

namespace detail {

using json = nlohmann::ordered_json;

/// Follows a parser through a document: knows where it stands and enforces the limits.
class parse_guard : public nlohmann::json_sax<json> {
 public:
  explicit parse_guard(const document_limits& l) : limits_(l) {}

  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool binary(binary_t&) override { return value(); }
  bool start_object(std::size_t) override { return open(true); }
  bool start_array(std::size_t) override { return open(false); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    auto& object = open_.back();
    object.key = name;
    if (!object.seen.insert(name).second) fail("appears twice");
    if (object.seen.size() > limits_.members) fail("more than " + std::to_string(limits_.members) + " members in an object");
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& why) override {
    const std::string what = why.what();
    fail("not JSON, " + what.substr(what.find("] ") + 2));
  }

  /// The place of the parser, such as `operations[3].inputs[0]`; control characters are shown as `?`.
  std::string where() const {
    std::string path;
    for (const auto& x : open_)
      path += x.is_object ? (path.empty() || x.key.empty() ? "" : ".") + x.key : "[" + std::to_string(x.index) + "]";
    std::replace_if(
        path.begin(), path.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, '?');
    return path.empty() ? "document" : path;
  }

 private:
  struct frame {
    bool is_object;
    std::size_t index;
    std::string key;
    std::unordered_set<std::string> seen;
  };
  [[noreturn]] void fail(const std::string& why) const { throw bad_document(where() + ": " + why); }
  bool value() {
    if (!open_.empty()) ++open_.back().index;
    return true;
  }
  bool open(bool object) {
    if (open_.size() >= limits_.depth) fail("nested deeper than " + std::to_string(limits_.depth));
    open_.push_back({object, 0, {}, {}});
    return true;
  }
  bool close() {
    open_.pop_back();
    return value();
  }

  document_limits limits_;
  std::vector<frame> open_;
};

/// Reads twice: a parser that is told of every element while it builds the document looks at all those before, too.
inline json parse(const std::string& text, const document_limits& l) {
  parse_guard guard(l);
  json::sax_parse(text, &guard);
  return json::parse(text);
}

/// An object of a document and its place there; typed access to its members.
class members {
 public:
  members(const json& object, std::string place) : object_(object), place_(std::move(place)) {
    if (!object.is_object()) throw bad_document((place_.empty() ? "document" : place_) + ": not an object");
  }

  std::string where(const char* key) const { return place_.empty() ? key : place_ + "." + key; }
  [[noreturn]] void fail(const char* key, const std::string& why) const { throw bad_document(where(key) + ": " + why); }
  bool has(const char* key) const { return object_.contains(key); }
  const json& at(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) fail(key, "missing");
    return *found;
  }

  std::int64_t integer(const char* key) const {
    const auto& x = at(key);
    if (!x.is_number_integer()) fail(key, "not an integer");
    const bool large = x.is_number_unsigned() ? x.get<std::uint64_t>() > static_cast<std::uint64_t>(max_bytes)
                                              : x.get<std::int64_t>() < -max_bytes;
    if (large) fail(key, "beyond 2^53: " + x.dump());
    return x.get<std::int64_t>();
  }
  double number(const char* key) const {
    if (!at(key).is_number()) fail(key, "not a number");
    return at(key).get<double>();
  }
  std::int64_t integer(const char* key, std::int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
  double number(const char* key, double otherwise) const { return has(key) ? number(key) : otherwise; }
  bool boolean(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!at(key).is_boolean()) fail(key, "not true or false");
    return at(key).get<bool>();
  }
  std::string text(const char* key, const char* otherwise) const {
    if (!has(key)) return otherwise;
    if (!at(key).is_string()) fail(key, "not a string");
    return at(key).get<std::string>();
  }
  const json& array(const char* key) const {
    if (!at(key).is_array()) fail(key, "not an array");
    return at(key);
  }
  /// The index of one of `count` values or operations.
  index_t index(const char* key, std::size_t count, const char* what) const { return index(at(key), where(key), count, what); }
  /// An array of indices of values.
  std::vector<value_id> indices(const char* key, std::size_t values) const {
    std::vector<value_id> all;
    for (const auto& x : array(key))
      all.push_back(index(x, where(key) + "[" + std::to_string(all.size()) + "]", values, "value"));
    return all;
  }
  /// What is left without the members named.
  json except(std::initializer_list<std::string_view> known) const {
    json rest = json::object();
    for (const auto& [key, x] : object_.items())
      if (std::find(known.begin(), known.end(), key) == known.end()) rest[key] = x;
    return rest;
  }
  void require_format(const char* format) const {
    if (text("format", "") != format) fail("format", std::string("not \"") + format + "\"");
    if (integer("version") != 1) fail("version", "only version 1 is known, got " + at("version").dump());
  }

 private:
  static index_t index(const json& x, const std::string& place, std::size_t count, const char* what) {
    if (!x.is_number_integer()) throw bad_document(place + ": not an integer");
    if (!x.is_number_unsigned() || x.get<std::uint64_t>() >= count) throw bad_problem(place + ": no " + what + " " + x.dump());
    return x.get<index_t>();
  }
  const json& object_;
  std::string place_;
};

inline std::string at_index(const char* list, std::size_t i) { return std::string(list) + "[" + std::to_string(i) + "]"; }

/// Text of a document: one line per member, and per element of its arrays.
inline std::string dump(const json& document) {
  std::string text = "{";
  const char* comma = "\n";
  try {
    for (const auto& [key, x] : document.items()) {
      text += comma + json(key).dump() + ": ";
      comma = ",\n";
      if (!x.is_array() || x.empty()) {
        text += x.dump();
        continue;
      }
      const char* open = "[\n  ";
      for (const auto& element : x) {
        text += open + element.dump();
        open = ",\n  ";
      }
      text += "]";
    }
  } catch (const json::exception&) {
    throw bad_document("a name is not valid UTF-8");
  }
  return text + "\n}\n";
}

/// Reads `path` with `read`, and names the file in what that throws.
template <class Read>
auto read_named(const std::filesystem::path& path, const document_limits& l, Read read) {
  std::istringstream in(read_file(path, l.bytes));
  const std::string file = path.string() + ": ";
  try {
    return read(in, l);
  } catch (const bad_document& why) {
    throw bad_document(file + why.what());
  } catch (const bad_problem& why) {
    throw bad_problem(file + why.what());
  } catch (const bad_schedule& why) {
    throw bad_schedule(why.step, file + why.what());
  }
}

}  // namespace detail

/// Reads a remat-problem and keeps the members that the library does not know.
/// @param in the text
/// @param l  bounds on what is accepted
/// @return the problem and its unknown members
/// @throws bad_document for a text that is not a remat-problem: truncated, another format or version, a missing, repeated or
///         mistyped member, an integer beyond 2^53, a bound exceeded; bad_problem for a document whose problem is not valid
/// Complexity: O(length of the text).
inline problem_document read_problem_document(std::istream& in, const document_limits& l = {}) {
  const auto root = detail::parse(read_text(in, l.bytes), l);
  const detail::members document(root, "");
  document.require_format("remat-problem");

  problem_document d;
  d.unknown.document =
      document.except({"format", "version", "name", "values", "operations", "targets", "offload", "backward_start"});
  std::vector<value> values;
  for (const auto& x : document.array("values")) {
    const detail::members v(x, detail::at_index("values", values.size()));
    values.push_back({.name = v.text("name", ""), .bytes = v.integer("bytes"), .held = v.boolean("held", false), .movable = v.boolean("movable", true)});
    d.unknown.values.push_back(v.except({"name", "bytes", "held", "movable"}));
  }
  std::vector<operation> operations;
  for (const auto& x : document.array("operations")) {
    const detail::members o(x, detail::at_index("operations", operations.size()));
    operations.push_back({.name = o.text("name", ""),
                          .inputs = o.indices("inputs", values.size()),
                          .outputs = o.indices("outputs", values.size()),
                          .seconds = o.number("seconds"),
                          .workspace = o.integer("workspace", 0),
                          .once = o.boolean("once", false),
                          .kind = o.text("kind", "")});
    d.unknown.operations.push_back(o.except({"name", "inputs", "outputs", "seconds", "workspace", "once", "kind"}));
  }
  auto targets = document.indices("targets", values.size());
  std::optional<copy_rates> copies;
  if (document.has("offload")) {
    const detail::members offload(document.at("offload"), "offload");
    copies = copy_rates{.to_host = offload.number("to_host"),
                        .to_device = offload.number("to_device"),
                        .latency = offload.number("latency", 0.0)};
    d.unknown.offload = offload.except({"to_host", "to_device", "latency"});
  }
  std::optional<operation_id> backward;
  if (document.has("backward_start")) backward = document.index("backward_start", operations.size(), "operation");
  d.problem = problem(document.text("name", ""), std::move(values), std::move(operations), std::move(targets), copies, backward);
  return d;
}

/// As above, from a file; messages begin with its name.
inline problem_document read_problem_document(const std::filesystem::path& path, const document_limits& l = {}) {
  return detail::read_named(path, l,
                            [](std::istream& in, const document_limits& bounds) { return read_problem_document(in, bounds); });
}

/// Reads a remat-problem. Everything as in `read_problem_document`.
/// @code
/// const remat::problem p = remat::read_problem("resnet18.json");
/// @endcode
inline problem read_problem(std::istream& in, const document_limits& l = {}) { return read_problem_document(in, l).problem; }
inline problem read_problem(const std::filesystem::path& path, const document_limits& l = {}) {
  return read_problem_document(path, l).problem;
}

/// Writes a remat-problem.
/// @param out     where to
/// @param p       the problem
/// @param unknown members to write besides those of `p`, from `read_problem_document`
/// @throws bad_document if a name is not valid UTF-8
inline void write_problem(std::ostream& out, const problem& p, const unknown_problem_members& unknown = {}) {
  using detail::json;
  json document = {{"format", "remat-problem"}, {"version", 1}, {"name", p.name()}, {"values", json::array()}};
  for (std::size_t i = 0; i < p.values().size(); ++i) {
    const auto& v = p.values()[i];
    json x = {{"name", v.name}, {"bytes", v.bytes}};
    if (v.held) x["held"] = true;
    if (!v.movable) x["movable"] = false;
    if (i < unknown.values.size()) x.update(unknown.values[i]);
    document["values"].push_back(std::move(x));
  }
  document["operations"] = json::array();
  for (std::size_t i = 0; i < p.operations().size(); ++i) {
    const auto& o = p.operations()[i];
    json x = {{"name", o.name}, {"inputs", o.inputs}, {"outputs", o.outputs}, {"seconds", o.seconds}};
    if (o.workspace) x["workspace"] = o.workspace;
    if (o.once) x["once"] = true;
    if (!o.kind.empty()) x["kind"] = o.kind;
    if (i < unknown.operations.size()) x.update(unknown.operations[i]);
    document["operations"].push_back(std::move(x));
  }
  document["targets"] = p.targets();
  if (p.backward_start()) document["backward_start"] = *p.backward_start();
  if (const auto& c = p.copies()) {
    document["offload"] = {{"to_host", c->to_host}, {"to_device", c->to_device}, {"latency", c->latency}};
    document["offload"].update(unknown.offload);
  }
  document.update(unknown.document);
  out << detail::dump(document);
}

/// As above, to a file, which is replaced as a whole or not at all.
/// @throws error if the file cannot be written
inline void write_problem(const std::filesystem::path& path, const problem& p, const unknown_problem_members& unknown = {}) {
  std::ostringstream text;
  write_problem(text, p, unknown);
  write_file(path, text.str());
}

/// Reads a remat-schedule. Only `steps` is required besides format and version.
/// @param in the text
/// @param l  bounds on what is accepted
/// @return what the document says; whether the schedule is valid for a problem is for `evaluate` to tell
/// @throws bad_document as `read_problem_document`; bad_schedule for a step that no problem has: an unknown action, an index that
///         is negative or beyond 2^32
/// Complexity: O(length of the text).
inline schedule_document read_schedule(std::istream& in, const document_limits& l = {}) {
  const auto root = detail::parse(read_text(in, l.bytes), l);
  const detail::members document(root, "");
  document.require_format("remat-schedule");

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
  if (known == status_names.end()) document.fail("status", "unknown: " + detail::json(name).dump());
  r.status = static_cast<status>(known - status_names.begin());
  r.reason = document.text("reason", "");

  auto& steps = r.schedule.steps;
  for (const auto& x : document.array("steps")) {
    auto place = [&] { return detail::at_index("steps", steps.size()); };
    if (!x.is_array() || x.size() != 2 || !x[0].is_string() || !x[1].is_number_integer())
      throw bad_document(place() + ": not an action and an index");
    const auto& action_name = x[0].get_ref<const std::string&>();
    auto wrong = [&](const std::string& who, const char* why) {
      throw bad_schedule(steps.size(), "step " + std::to_string(steps.size()) + " (" + who + " " + x[1].dump() + "): " + why);
    };
    const auto found = std::find(std::begin(action_names), std::end(action_names), action_name);
    if (found == std::end(action_names)) wrong(x[0].dump(), "no such action");
    step next;
    next.what = static_cast<action>(found - std::begin(action_names));
    if (!x[1].is_number_unsigned() || x[1].get<std::uint64_t>() >= none)
      wrong(action_name, next.what == action::compute ? "no such operation" : "no such value");
    next.which = x[1].get<index_t>();
    steps.push_back(next);
  }
  d.unknown = document.except(
      {"format", "version", "problem", "status", "reason", "budget", "peak", "seconds", "bound", "solver", "steps"});
  return d;
}

/// As above, from a file; messages begin with its name.
inline schedule_document read_schedule(const std::filesystem::path& path, const document_limits& l = {}) {
  return detail::read_named(path, l, [](std::istream& in, const document_limits& bounds) { return read_schedule(in, bounds); });
}

/// Writes a remat-schedule.
/// @param out     where to
/// @param r       what a solver returned
/// @param problem name of the problem it was made for
/// @param unknown members to write besides, from `read_schedule`
/// @throws bad_document if a name is not valid UTF-8
inline void write_schedule(std::ostream& out, const result& r, std::string_view problem,
                           const nlohmann::ordered_json& unknown = nlohmann::ordered_json::object()) {
  using detail::json;
  json document = {{"format", "remat-schedule"}, {"version", 1},          {"problem", problem},   {"status", to_string(r.status)},
                   {"budget", r.budget},         {"peak", r.peak},        {"seconds", r.seconds}, {"bound", r.bound},
                   {"solver", r.solver},         {"steps", json::array()}};
  if (!r.reason.empty()) document["reason"] = r.reason;
  for (const auto& x : r.schedule.steps) document["steps"].push_back(json::array({to_string(x.what), x.which}));
  document.update(unknown);
  out << detail::dump(document);
}

/// As above, to a file, which is replaced as a whole or not at all.
/// @throws error if the file cannot be written
inline void write_schedule(const std::filesystem::path& path, const result& r, std::string_view problem,
                           const nlohmann::ordered_json& unknown = nlohmann::ordered_json::object()) {
  std::ostringstream text;
  write_schedule(text, r, problem, unknown);
  write_file(path, text.str());
}

}  // namespace remat
