// SPDX-License-Identifier: Apache-2.0
#include <c10/util/hash.h>

#include <algorithm>
#include <remat/io/json.hpp>
#include <remat/pytorch/io.hpp>
#include <remat/pytorch/plan_cache.hpp>
#include <sstream>
#include <tuple>

#include "../base/views.hpp"
#include "../profile/environment.hpp"

namespace remat::pytorch {

std::filesystem::path plan_cache::default_folder() {
  const auto folder = cache_folder();
  return folder.empty() ? folder : folder / "plans";
}

std::optional<std::string> plan_cache::key(const program& step, bytes_t available, const std::string& solver,
                                           const limits& l) const {
  if (folder_.empty() || solver.empty()) return std::nullopt;
  std::ostringstream text;
  text.precision(17);
  constexpr int edition = 4;  // raise it if searches find better plans or truer bounds than those that users have cached
  text << "remat-plans " << edition << ";" << environment(device_of(device_of_step(step))) << ";" << available << ";" << solver
       << ";" << l.seconds << ";" << l.gap << ";" << l.seed << ";";
  try {
    write_program(text, step, {.names = false, .contents = false});
  } catch (const error&) {  // documents cannot hold every kind of argument
    return std::nullopt;
  }
  return c10::sha1(text.str()).str();
}

std::optional<result> plan_cache::find(const std::string& key) const {
  namespace fs = std::filesystem;
  std::error_code failed;
  if (!fs::is_regular_file(file(key), failed)) return std::nullopt;
  try {
    auto found = read_schedule(file(key));
    if (found.problem != key || !found.result.found()) throw bad_document("not the plan of this name");
    fs::last_write_time(file(key), fs::file_time_type::clock::now(), failed);
    return std::move(found.result);
  } catch (const std::exception&) {
    fs::remove(file(key), failed);
    return std::nullopt;
  }
}

void plan_cache::store(const std::string& key, const result& found) const {
  try {
    std::filesystem::create_directories(folder_);
    write_schedule(file(key), found, key);
    trim();
  } catch (const std::exception&) {  // not fatal: the next process searches again
  }
}

void plan_cache::trim() const {
  namespace fs = std::filesystem;
  std::vector<std::tuple<fs::file_time_type, bytes_t, fs::path>> files;
  bytes_t sum = 0;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    std::error_code failed;  // another process may have removed it
    if (!entry.is_regular_file(failed)) continue;
    const auto bytes = entry.file_size(failed);
    if (failed) continue;
    const auto used = entry.last_write_time(failed);
    if (failed) continue;
    files.emplace_back(used, static_cast<bytes_t>(bytes), entry.path());
    sum += static_cast<bytes_t>(bytes);
  }
  std::sort(files.begin(), files.end());
  for (const auto& [used, bytes, path] : files) {
    if (sum <= limit_) return;
    std::error_code failed;
    fs::remove(path, failed);
    sum -= bytes;
  }
}

}  // namespace remat::pytorch
