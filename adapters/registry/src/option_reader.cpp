// SPDX-License-Identifier: Apache-2.0
#include "option_reader.hpp"

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include <remat/core/error.hpp>

namespace remat::registry {
namespace {

template <class T>
std::string text_of(const T& x) {
  std::ostringstream out;
  out << std::boolalpha << x;
  return out.str();
}

/// Reads the whole text as a number; nothing if it is no number within the range.
template <class T>
std::optional<T> number_in(const std::string& text, T least, T most) {
  T x{};
  const auto end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, x);
  if (error != std::errc() || rest != end || !(least <= x && x <= most)) return std::nullopt;
  return x;
}

}  // namespace

template <class T, class Parse>
void option_reader::read(option o, T& value, Parse parse) {
  o.standard = text_of(value);
  if (const auto found = given_.find(o.name); found != given_.end()) {
    const std::optional<T> x = parse(found->second);
    if (!x)
      throw bad_option(std::string(solver_) + ": option " + o.name + " must be " + o.range + ", got \"" + found->second + "\"");
    value = *x;
  }
  known_.push_back(std::move(o));
}

void option_reader::operator()(const std::string& name, std::size_t& value, std::size_t least, std::size_t most,
                               const std::string& summary) {
  read({name, {}, "an integer from " + text_of(least) + " to " + text_of(most), summary}, value,
       [&](const std::string& text) { return number_in(text, least, most); });
}

void option_reader::operator()(const std::string& name, double& value, double least, double most, const std::string& summary) {
  read({name, {}, "a number from " + text_of(least) + " to " + text_of(most), summary}, value,
       [&](const std::string& text) { return number_in(text, least, most); });
}

void option_reader::operator()(const std::string& name, bool& value, const std::string& summary) {
  read({name, {}, "true or false", summary}, value,
       [](const std::string& text) { return text == "true" || text == "false" ? std::optional(text == "true") : std::nullopt; });
}

void option_reader::refuse_unknown() const {
  for (const auto& [name, value] : given_) {
    const auto same = [&name = name](const option& o) { return o.name == name; };
    if (std::any_of(known_.begin(), known_.end(), same)) continue;
    std::string list;
    for (const auto& o : known_) list += (list.empty() ? "" : ", ") + o.name;
    throw bad_option("solver " + std::string(solver_) + " has no option \"" + name + "\"; it has " +
                     (list.empty() ? "none" : list));
  }
}

}  // namespace remat::registry
