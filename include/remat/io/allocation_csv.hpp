// SPDX-License-Identifier: Apache-2.0
/// @file
/// Allocations and their offsets as CSV, in MiniMalloc's format.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_set>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/io/file.hpp>
#include <remat/layout/allocation.hpp>

namespace remat {

/// Allocations with names.
struct allocation_table {
  std::vector<std::string> ids;  ///< one name per allocation, all different
  std::vector<allocation> list;
};

namespace detail {

inline std::vector<std::string_view> csv_fields(std::string_view line) {
  std::vector<std::string_view> fields;
  for (;;) {
    const auto comma = line.find(',');
    fields.push_back(line.substr(0, comma));
    if (comma == std::string_view::npos) return fields;
    line.remove_prefix(comma + 1);
  }
}

/// Reads one CSV text. Every error names the line.
class allocation_reader {
 public:
  explicit allocation_reader(std::string_view text) : text_(text) {
    if (constexpr std::string_view mark = "\xEF\xBB\xBF"; text_.substr(0, mark.size()) == mark)  // of spreadsheets
      text_.remove_prefix(mark.size());
  }

  allocation_table read() {
    if (!next()) throw bad_document("line 1: empty; the first line must name the columns id,lower,upper,size");
    read_header();
    allocation_table t;
    std::unordered_set<std::string> seen;
    while (next()) {
      const auto fields = csv_fields(line_);
      if (fields.size() != columns_)
        fail(std::to_string(fields.size()) + " fields, and the first line has " + std::to_string(columns_));
      const std::string id(fields[column_positions_[0]]);
      if (!seen.insert(id).second) fail("field \"id\": \"" + id + "\" is there twice");
      const allocation a{instant(fields, 1), instant(fields, 2), number(fields, 3)};
      if (a.birth >= a.death)
        fail("field \"upper\": " + std::to_string(a.death) + " is not above the lower " + std::to_string(a.birth));
      if (a.bytes < 0) fail("field \"size\": " + std::to_string(a.bytes) + " is negative");
      total_ += std::min(a.bytes, max_bytes + 1);
      if (total_ > max_bytes) fail("field \"size\": the sum of the sizes exceeds 2^53 bytes");
      t.ids.push_back(id);
      t.list.push_back(a);
    }
    return t;
  }

 private:
  static constexpr std::array<std::string_view, 4> names = {"id", "lower", "upper", "size"};

  [[noreturn]] void fail(const std::string& why) const {
    throw bad_document("line " + std::to_string(line_number_) + ": " + why);
  }

  /// Advances to the next line that is not empty. @return false at the end
  bool next() {
    while (!text_.empty()) {
      const auto end = text_.find('\n');
      line_ = text_.substr(0, end);
      text_.remove_prefix(end == std::string_view::npos ? text_.size() : end + 1);
      if (!line_.empty() && line_.back() == '\r') line_.remove_suffix(1);
      ++line_number_;
      if (!line_.empty()) return true;
    }
    return false;
  }

  void read_header() {
    const auto fields = csv_fields(line_);
    columns_ = fields.size();
    for (auto f : fields)
      if (std::find(names.begin(), names.end(), f) == names.end() && f != "offset")
        fail("field \"" + std::string(f) + "\" is not a column that this program knows; it reads id,lower,upper,size");
    for (std::size_t k = 0; k < names.size(); ++k) {
      const auto found = std::find(fields.begin(), fields.end(), names[k]);
      if (found == fields.end()) fail("field \"" + std::string(names[k]) + "\" is missing; the columns are id,lower,upper,size");
      if (std::count(fields.begin(), fields.end(), names[k]) > 1) fail("field \"" + std::string(names[k]) + "\" is there twice");
      column_positions_[k] = static_cast<std::size_t>(found - fields.begin());
    }
  }

  std::int64_t number(const std::vector<std::string_view>& fields, std::size_t column) const {
    const auto field = fields[column_positions_[column]];
    std::int64_t out = 0;
    const auto [rest, failed] = std::from_chars(field.data(), field.data() + field.size(), out);
    if (failed != std::errc{} || rest != field.data() + field.size())
      fail("field \"" + std::string(names[column]) + "\": \"" + std::string(field) + "\" is not an integer of 64 bits");
    return out;
  }

  std::int64_t instant(const std::vector<std::string_view>& fields, std::size_t column) const {
    const auto when = number(fields, column);
    if (when < -latest_instant || when > latest_instant)
      fail("field \"" + std::string(names[column]) + "\": " + std::to_string(when) + " is beyond 2^62");
    return when;
  }

  std::string_view text_, line_;
  std::size_t line_number_ = 0, columns_ = 0;
  std::array<std::size_t, names.size()> column_positions_{};  ///< positions of the columns `names`
  bytes_t total_ = 0;
};

}  // namespace detail

/// Reads allocations from CSV. The first line names the columns id, lower, upper and size, in any order. A column `offset` and a
/// byte order mark are ignored. An allocation is live from its lower until just before its upper instant.
/// @param text the CSV
/// @return the allocations in the order of the lines
/// @throws bad_document naming the line and the field: a missing, unknown or repeated column; a wrong number of fields; a field
///         that is not an integer; an instant beyond 2^62; a repeated id; an upper that is not above the lower; a negative size;
///         sizes beyond 2^53 bytes in total
/// Complexity: O(length).
/// @code
/// auto t = remat::parse_allocations("id,lower,upper,size\nx,0,2,100\n");
/// @endcode
inline allocation_table parse_allocations(std::string_view text) { return detail::allocation_reader(text).read(); }

/// Reads allocations from a CSV file of at most 1 GiB.
/// @throws bad_document as `parse_allocations`, with the name of the file; also if the file cannot be read
inline allocation_table read_allocations(const std::filesystem::path& path) {
  const auto text = read_file(path, std::size_t{1} << 30);
  try {
    return parse_allocations(text);
  } catch (const bad_document& why) {
    throw bad_document(path.string() + ": " + why.what());
  }
}

/// Writes allocations and their offsets as CSV, with columns id, lower, upper, size, offset.
/// @param out     the stream
/// @param t       allocations with names
/// @param offsets one per allocation, bytes
inline void write_allocations(std::ostream& out, const allocation_table& t, std::span<const bytes_t> offsets) {
  out << "id,lower,upper,size,offset\n";
  for (std::size_t i = 0; i < t.list.size(); ++i)
    out << t.ids[i] << ',' << t.list[i].birth << ',' << t.list[i].death << ',' << t.list[i].bytes << ',' << offsets[i] << '\n';
}

}  // namespace remat
