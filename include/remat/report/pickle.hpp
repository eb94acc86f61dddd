// SPDX-License-Identifier: Apache-2.0
/// @file
/// JSON values as Python pickles. Needs nlohmann/json.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include <remat/core/error.hpp>

namespace remat::detail {

/// Writes a value as a pickle of protocol 2, with the opcodes that PyTorch's memory viewer reads.
/// Complexity: O(bytes of the value).
///
/// Reference: Python's `pickletools`, which documents the opcodes.
class pickle_writer {
 public:
  static std::string write(const nlohmann::ordered_json& x) {
    pickle_writer w;
    w.out_ = "\x80\x02";
    w.put(x);
    return w.out_ + ".";
  }

 private:
  void put(const nlohmann::ordered_json& x) {
    if (x.is_object()) {
      out_ += "}(";
      for (const auto& [key, member] : x.items()) text(key), put(member);
      out_ += 'u';
    } else if (x.is_array()) {
      out_ += "](";
      for (const auto& element : x) put(element);
      out_ += 'e';
    } else if (x.is_string()) {
      text(x.get_ref<const std::string&>());
    } else if (x.is_number_integer()) {
      out_ += "\x8a\x08";  // LONG1, 8 bytes
      little_endian(x.get<std::uint64_t>(), 8);
    } else if (x.is_boolean()) {
      out_ += x.get<bool>() ? '\x88' : '\x89';
    } else {
      throw bad_document("a pickle of the memory viewer has no values such as " + x.dump());
    }
  }
  void text(const std::string& s) {
    out_ += 'X';
    little_endian(s.size(), 4);
    out_ += s;
  }
  void little_endian(std::uint64_t number, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(number >> (8 * i) & 0xff);
  }
  std::string out_;
};

}  // namespace remat::detail
