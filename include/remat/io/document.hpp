// SPDX-License-Identifier: Apache-2.0
/// @file
/// Common parts of the readers and writers of JSON documents: limits, places in messages, typed access. Needs nlohmann/json.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/error.hpp>
#include <remat/core/types.hpp>
#include <remat/io/file.hpp>

namespace remat {

/// Limits on the documents that a reader accepts.
struct document_limits {
  std::size_t bytes = std::size_t{256} << 20;  ///< bytes of the text
  std::size_t depth = 64;                      ///< nesting depth of arrays and objects
  std::size_t members = 1024;                  ///< members of one object
};

/// Writes an id as a number; nlohmann-json calls this. @tparam Json a basic_json
template <class Json, class Kind, class Index>
void to_json(Json& j, const id<Kind, Index>& i) {
  j = static_cast<index_t>(i);
}

namespace detail {

using json = nlohmann::ordered_json;

/// A SAX handler that knows the place of the parser in the document and enforces the limits.
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

  /// The place of the parser, such as `operations[3].inputs[0]`. Control characters appear as `?`.
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

/// Parses a text within limits, in two passes: first the checks, then the document. A single pass with
/// a callback would take quadratic time, because it visits all earlier elements at each element.
/// Complexity: O(bytes of the text).
inline json parse(const std::string& text, const document_limits& l) {
  parse_guard guard(l);
  json::sax_parse(text, &guard);
  return json::parse(text);
}

/// Typed access to the members of an object. Errors name the place of the object in the document.
class members {
 public:
  members(const json& object, std::string place) : object_(object), place_(std::move(place)) {
    if (!object.is_object()) throw bad_document((place_.empty() ? "document" : place_) + ": not an object");
  }

  std::string where(const char* key) const { return place_.empty() ? key : place_ + "." + key; }
  [[noreturn]] void fail(const char* key, const std::string& why) const { throw bad_document(where(key) + ": " + why); }
  bool has(const char* key) const { return object_.contains(key); }
  const json& at(const char* key) const {
    const auto entry = object_.find(key);
    if (entry == object_.end()) fail(key, "missing");
    return *entry;
  }

  std::int64_t integer(const char* key) const {
    const auto& x = at(key);
    constexpr std::uint64_t limit = std::numeric_limits<std::int64_t>::max();
    if (!x.is_number_integer() || (x.is_number_unsigned() && x.get<std::uint64_t>() > limit))
      fail(key, "not an integer of 64 bits");
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
  /// An array of pairs of indices of values.
  std::vector<std::pair<value_id, value_id>> pairs(const char* key, std::size_t values) const {
    std::vector<std::pair<value_id, value_id>> all;
    for (const auto& x : array(key)) {
      const auto place = where(key) + "[" + std::to_string(all.size()) + "]";
      if (!x.is_array() || x.size() != 2) throw bad_document(place + ": not a pair of indices");
      all.emplace_back(index(x[0], place + "[0]", values, "value"), index(x[1], place + "[1]", values, "value"));
    }
    return all;
  }
  /// The object without the members in `known`.
  json except(std::initializer_list<std::string_view> known) const {
    json rest = json::object();
    for (const auto& [key, x] : object_.items())
      if (std::find(known.begin(), known.end(), key) == known.end()) rest[key] = x;
    return rest;
  }
  /// Checks the format of a document and returns its version.
  /// @param newest the newest known version, 1 or 2
  /// @throws bad_document for another format or an unknown version
  std::int64_t version(const char* format, std::int64_t newest) const {
    if (text("format", "") != format) fail("format", std::string("not \"") + format + "\"");
    const auto v = integer("version");
    if (v < 1 || v > newest)
      fail("version",
           std::string("only version") + (newest == 1 ? " 1 is" : "s 1 and 2 are") + " known, got " + at("version").dump());
    return v;
  }
  void require_format(const char* format) const { version(format, 1); }

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

/// Text of a document: one line per member, and one line per element of its arrays.
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

/// Reads the file `path` with `read`. Exceptions of `read` get the name of the file.
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

}  // namespace remat
