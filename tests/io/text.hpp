// SPDX-License-Identifier: Apache-2.0
/// @file
/// Helpers for the tests of text pictures.
#pragma once

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

inline std::vector<std::string> lines(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> all;
  for (std::string line; std::getline(in, line);) all.push_back(line);
  return all;
}

/// The number of characters of a UTF-8 text.
inline auto characters(const std::string& text) {
  return std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; });
}

/// A text of `n` characters of two bytes each.
inline std::string umlauts(std::size_t n) {
  std::string text;
  for (; n > 0; --n) text += "\u00e4";
  return text;
}

inline auto count(const std::string& text, const std::string& what) {
  int n = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}
