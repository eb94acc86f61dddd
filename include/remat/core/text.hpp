// SPDX-License-Identifier: Apache-2.0
/// @file
/// Numbers as text, and texts cut to a length.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

namespace remat::detail {

/// The number in a format of `printf`, at most 63 characters.
inline std::string printed(const char* format, double number) {
  char text[64];
  std::snprintf(text, sizeof text, format, number);
  return text;
}

/// At most `bytes` bytes of a UTF-8 text, without a partial character at the end.
inline std::string shortened(const std::string& text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  while (bytes > 0 && (static_cast<unsigned char>(text[bytes]) & 0xc0) == 0x80) --bytes;
  return text.substr(0, bytes);
}

}  // namespace remat::detail
