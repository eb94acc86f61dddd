// SPDX-License-Identifier: Apache-2.0
/// @file
/// Safe output of names from files on terminals.
#pragma once

#include <cstddef>
#include <cstdio>
#include <ostream>
#include <streambuf>
#include <string>
#include <string_view>

namespace cli {

/// Escapes control characters except newlines as in JSON, such as \u001b. A name in a file must not be able to move the cursor of
/// a terminal, or to overwrite its text.
inline std::string printable(std::string_view text) {
  std::string out;
  const auto escape = [&](unsigned char c) {
    char code[8];
    std::snprintf(code, sizeof code, "\\u%04x", c);
    out += code;
  };
  for (std::size_t k = 0; k < text.size(); ++k) {
    const auto c = static_cast<unsigned char>(text[k]), next = static_cast<unsigned char>(k + 1 < text.size() ? text[k + 1] : 0);
    if ((c < 0x20 && c != '\n') || c == 0x7f)
      escape(c);
    else if (c == 0xc2 && next >= 0x80 && next < 0xa0)  // U+0080 to U+009f in UTF-8: the other control characters
      escape(next), ++k;
    else
      out += text[k];
  }
  return out;
}

/// Makes all output of a stream `printable` as long as this object lives.
class printable_stream : private std::streambuf {
 public:
  explicit printable_stream(std::ostream& out) : out_(out), below_(out.rdbuf(this)) {}
  printable_stream(const printable_stream&) = delete;
  printable_stream& operator=(const printable_stream&) = delete;
  ~printable_stream() override { out_.rdbuf(below_); }

 private:
  std::streamsize xsputn(const char* text, std::streamsize size) override {
    const auto shown = printable({text, static_cast<std::size_t>(size)});
    const auto all = static_cast<std::streamsize>(shown.size());
    return below_->sputn(shown.data(), all) == all ? size : 0;
  }
  int_type overflow(int_type c) override {
    const auto one = traits_type::to_char_type(c);
    return traits_type::eq_int_type(c, traits_type::eof()) || xsputn(&one, 1) == 1 ? traits_type::not_eof(c) : traits_type::eof();
  }
  int sync() override { return below_->pubsync(); }

  std::ostream& out_;
  std::streambuf* below_;
};

}  // namespace cli
