// SPDX-License-Identifier: Apache-2.0
/// @file
/// Sizes, budgets and durations as text.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <remat/core/error.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/text.hpp>

namespace remat {

/// Reads a size such as `1234`, `300MB` or `1.5 GiB`. Units are B, kB, MB, GB, TB, PB, EB (powers of 1000) and KiB to EiB
/// (powers of 1024), in upper or lower case. Without a unit the number means bytes. Whole numbers are read exactly. A fraction
/// of a byte is cut off.
/// @param text the size
/// @return bytes, from 0 to 2^63 - 1
/// @throws bad_option naming the text, if it is not a size or exceeds the range
inline bytes_t parse_bytes(std::string_view text) {
  const auto fail = [&](const char* why) { throw bad_option("\"" + std::string(text) + "\" is not a size: " + why); };
  static constexpr std::pair<std::string_view, bytes_t> units[] = {
      {"", 1},
      {"b", 1},
      {"kb", 1'000},
      {"mb", 1'000'000},
      {"gb", 1'000'000'000},
      {"tb", 1'000'000'000'000},
      {"pb", 1'000'000'000'000'000},
      {"eb", 1'000'000'000'000'000'000},
      {"kib", bytes_t{1} << 10},
      {"mib", bytes_t{1} << 20},
      {"gib", bytes_t{1} << 30},
      {"tib", bytes_t{1} << 40},
      {"pib", bytes_t{1} << 50},
      {"eib", bytes_t{1} << 60},
  };
  const char *const begin = text.data(), *const end = begin + text.size();
  double number = 0, fraction = 0;
  auto [rest, failed] = std::from_chars(begin, end, number, std::chars_format::fixed);
  if (failed != std::errc{} || !std::isfinite(number)) fail("no number");
  if (std::signbit(number)) fail("negative");
  bytes_t bytes = 0;
  const auto* const dot = std::find(begin, rest, '.');
  const bool small = dot == begin || std::from_chars(begin, dot, bytes).ec == std::errc{};
  std::from_chars(dot, rest, fraction, std::chars_format::fixed);
  while (rest != end && *rest == ' ') ++rest;
  std::string name(rest, end);
  for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto* const found = std::find_if(std::begin(units), std::end(units), [&](const auto& u) { return u.first == name; });
  if (found == std::end(units)) fail("unknown unit");
  const auto part = static_cast<bytes_t>(fraction * static_cast<double>(found->second));
  if (!small || bytes > (std::numeric_limits<bytes_t>::max() - part) / found->second) fail("beyond 2^63 - 1 bytes");
  return bytes * found->second + part;
}

/// Writes a size with a binary unit and up to three significant digits, such as `1.5 GiB`.
inline std::string format_bytes(bytes_t bytes) {
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double number = static_cast<double>(bytes);
  int u = 0;
  while (std::abs(number) >= 999.5 && u < 6) {
    number /= 1024;
    ++u;
  }
  return detail::printed("%.3g ", number) + units[u];
}

/// Writes a duration in seconds with up to four significant digits, such as `2.056 ms`.
inline std::string format_seconds(double seconds) {
  static constexpr std::pair<double, const char*> units[] = {{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}};
  for (const auto& [factor, unit] : units)
    if (std::abs(seconds) >= 0.99995 * factor) return detail::printed("%.4g ", seconds / factor) + unit;
  return detail::printed("%.4g ", seconds * 1e9) + (seconds == 0 ? "s" : "ns");
}

/// Reads a budget: a size as in `parse_bytes`, or `N%`.
///
/// `N%` means the bytes of held sources plus N % of what store-all needs beyond them: `60%` = held + 0.6 (store-all peak -
/// held). `100%` fits store-all exactly. `0%` is never enough, unless no value has to be kept. With several tiers,
/// store-all is measured as if all values were on the device (`measure_store_all`).
/// @param text the budget
/// @param p    the problem of the budget
/// @return bytes, including held sources
/// @throws bad_option naming the text, if it is not a budget or exceeds 2^63 - 1 bytes
/// Complexity: O(values + edges) for a percentage.
/// @code
/// remat::solve(p, remat::parse_budget("60%", p), remat::rotor{});
/// @endcode
inline bytes_t parse_budget(std::string_view text, const problem& p) {
  if (text.empty() || text.back() != '%') return parse_bytes(text);
  const auto number = text.substr(0, text.size() - 1);
  double percent = 0;
  const auto [rest, failed] = std::from_chars(number.data(), number.data() + number.size(), percent, std::chars_format::fixed);
  if (failed != std::errc{} || rest != number.data() + number.size() || !std::isfinite(percent) || std::signbit(percent))
    throw bad_option("\"" + std::string(text) + "\" is not a budget: no percentage >= 0");
  const auto beyond = static_cast<double>(measure_store_all(p).peak - p.held_bytes());
  const double more = percent / 100 * beyond;
  if (more >= 0x1p63 - static_cast<double>(p.held_bytes()))
    throw bad_option("\"" + std::string(text) + "\" is not a budget: beyond 2^63 - 1 bytes");
  return p.held_bytes() + static_cast<bytes_t>(more);
}

}  // namespace remat
