// SPDX-License-Identifier: Apache-2.0
/// @file
/// Reads and writes whole files: reads with a limit, writes atomically.
#pragma once

#include <cerrno>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <istream>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <system_error>

#include <remat/core/error.hpp>

namespace remat {

/// Reads the rest of a stream.
/// @param in    the stream
/// @param limit largest accepted length, bytes
/// @return the text
/// @throws bad_document if the stream is broken or longer than `limit`
/// Complexity: O(bytes).
inline std::string read_text(std::istream& in, std::size_t limit) {
  std::string text;
  char block[1 << 16];
  while (in.read(block, sizeof block), in.gcount() > 0) {
    text.append(block, static_cast<std::size_t>(in.gcount()));
    if (text.size() > limit) throw bad_document("longer than the limit of " + std::to_string(limit) + " bytes");
  }
  if (in.bad() || !in.eof()) throw bad_document("cannot be read");
  return text;
}

/// Reads a file.
/// @param path  the file
/// @param limit largest accepted length, bytes
/// @throws bad_document naming the file and the reason: it cannot be read, is a directory, or is longer than `limit`
inline std::string read_file(const std::filesystem::path& path, std::size_t limit) {
  if (std::error_code ignored; std::filesystem::is_directory(path, ignored))
    throw bad_document(path.string() + ": is a directory");
  std::ifstream in(path, std::ios::binary);
  if (!in) throw bad_document(path.string() + ": " + std::strerror(errno));
  try {
    return read_text(in, limit);
  } catch (const bad_document& why) {
    throw bad_document(path.string() + ": " + why.what());
  }
}

/// Checks that `write_file` could write to `path` now. Callers ask before the work whose result the file will hold.
/// @throws error naming the file and the reason, if it cannot be written
inline void require_writable(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code failed;
  const bool exists = fs::exists(path, failed);
  if (exists && fs::is_directory(path, failed)) throw error("cannot write " + path.string() + ": is a directory");
  if (exists && !fs::is_regular_file(path, failed)) return;
  fs::path part = exists ? fs::canonical(path, failed) : path;
  part += "." + std::to_string(std::random_device{}()) + ".part";
  const bool created = std::ofstream(part).good();
  const std::string why = std::strerror(errno);
  fs::remove(part, failed);
  if (!created) throw error("cannot write " + path.string() + ": " + why);
}

/// Writes a file atomically: readers see the old content or the new content, and a failure leaves the old file.
///
/// The content goes to a new file in the same directory, which then replaces `path`. A path that is not a regular file (a pipe,
/// a terminal) is written directly.
/// @param path the file
/// @param put  called with the stream; an exception of `put` leaves the old file
/// @throws error naming the file and the reason, if it cannot be written; any exception of `put`
/// Complexity: O(bytes).
template <std::invocable<std::ostream&> Put>
void write_file(const std::filesystem::path& path, const Put& put) {
  namespace fs = std::filesystem;
  auto fail = [&](const std::string& why) { throw error("cannot write " + path.string() + ": " + why); };
  auto put_to = [&](const fs::path& to) {
    std::ofstream out(to, std::ios::binary);
    if (!out) return false;
    put(out);
    out << std::flush;
    return out.good();
  };
  std::error_code failed;
  const bool exists = fs::exists(path, failed);
  if (exists && fs::is_directory(path, failed)) fail("is a directory");
  if (exists && !fs::is_regular_file(path, failed)) {
    if (!put_to(path)) fail(std::strerror(errno));
    return;
  }
  const fs::path target = exists ? fs::canonical(path, failed) : path;
  if (failed && exists) fail(failed.message());
  fs::path part = target;
  part += "." + std::to_string(std::random_device{}()) + ".part";
  try {
    if (!put_to(part)) fail(std::strerror(errno));
    fs::rename(part, target, failed);
    if (failed) fail(failed.message());
  } catch (...) {
    std::error_code ignored;
    fs::remove(part, ignored);
    throw;
  }
}

/// Writes a text to a file atomically. @throws error as above
inline void write_file(const std::filesystem::path& path, std::string_view text) {
  write_file(path, [&](std::ostream& out) { out << text; });
}

}  // namespace remat
