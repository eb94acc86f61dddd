// SPDX-License-Identifier: Apache-2.0
/// @file
/// A value of a JSON document that knows its place, so that every error names the record and the field.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <remat/core/error.hpp>

namespace remat::pytorch::exported {

/// Refers to the document, which must outlive it.
class field {
 public:
  using json = nlohmann::json;
  field(const json& value, std::string place) : value_(&value), place_(std::move(place)) {}

  [[noreturn]] void fail(const std::string& why) const { throw bad_document(place_ + ": " + why); }
  const std::string& place() const { return place_; }
  bool is_null() const { return value_->is_null(); }
  bool is_text() const { return value_->is_string(); }

  std::optional<field> find(const std::string& key) const {
    if (!value_->is_object()) fail("not an object");
    const auto found = value_->find(key);
    if (found == value_->end()) return std::nullopt;
    return field(*found, place_ + "." + key);
  }
  field at(const std::string& key) const {
    auto found = find(key);
    if (!found) fail("'" + key + "' is missing");
    return *std::move(found);
  }
  std::vector<field> elements() const {
    if (!value_->is_array()) fail("not an array");
    std::vector<field> all;
    for (const auto& x : *value_) all.emplace_back(x, place_ + "[" + std::to_string(all.size()) + "]");
    return all;
  }
  std::vector<std::pair<std::string, field>> members() const {
    if (!value_->is_object()) fail("not an object");
    std::vector<std::pair<std::string, field>> all;
    for (const auto& [key, x] : value_->items()) all.emplace_back(key, field(x, place_ + "." + key));
    return all;
  }
  /// The only member of an object. The schema writes a choice as such an object.
  std::pair<std::string, field> choice() const {
    auto all = members();
    if (all.size() != 1) fail("not an object of one member");
    return all.front();
  }

  int64_t integer() const {
    if (!value_->is_number_integer()) fail("not an integer");
    if (value_->is_number_unsigned() && value_->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fail("beyond 2^63");
    return value_->get<int64_t>();
  }
  /// A number. The schema writes infinities and NaN as text.
  double number() const {
    if (value_->is_number()) return value_->get<double>();
    if (is_text()) {
      if (text() == "Infinity") return std::numeric_limits<double>::infinity();
      if (text() == "-Infinity") return -std::numeric_limits<double>::infinity();
      if (text() == "NaN") return std::numeric_limits<double>::quiet_NaN();
    }
    fail("not a number");
  }
  bool boolean() const {
    if (!value_->is_boolean()) fail("not true or false");
    return value_->get<bool>();
  }
  const std::string& text() const {
    if (!is_text()) fail("not a string");
    return value_->get_ref<const std::string&>();
  }

 private:
  const json* value_;
  std::string place_;
};

}  // namespace remat::pytorch::exported
