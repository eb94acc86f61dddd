// SPDX-License-Identifier: Apache-2.0
/// @file
/// A cache of plans on disk.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// A folder of schedules, one file (remat-schedule) per key. Several processes may share a folder.
///
/// A cache failure costs time only. A file that is missing, damaged or cannot be written is no error. The caller judges a cached
/// schedule as it judges a solver's answer.
class plan_cache {
 public:
  /// @param folder folder of the files, made when first needed; empty: no cache
  /// @param limit  largest sum of all files, bytes; beyond it the least recently used files are removed
  explicit plan_cache(std::filesystem::path folder = default_folder(), bytes_t limit = bytes_t{64} << 20)
      : folder_(std::move(folder)), limit_(limit) {}

  /// `$XDG_CACHE_HOME/remat/plans`, else `~/.cache/remat/plans`, else empty.
  static std::filesystem::path default_folder();

  /// Hash of everything a plan depends on: the edition of the planner, the program without names and contents, PyTorch,
  /// processor, threads, budget, solver, limits of the search.
  /// @param step      the program
  /// @param available budget of the step, bytes
  /// @param solver    name and options of the solver
  /// @param l         limits of the search
  /// @return the key; nothing without a folder, without a name of the solver, or if the program cannot be written as a document
  /// Complexity: linear in the text of the program.
  std::optional<std::string> key(const program& step, bytes_t available, const std::string& solver, const limits& l) const;

  /// Finds the result stored under a key, with the times and bounds of its search, and marks it as just used.
  /// @return nothing if there is no valid file
  std::optional<result> find(const std::string& key) const;
  /// Writes a result completely or not at all. Removes the least recently used files beyond the limit.
  void store(const std::string& key, const result& found) const;

 private:
  std::filesystem::path file(const std::string& key) const { return folder_ / (key + ".json"); }
  void trim() const;

  std::filesystem::path folder_;
  bytes_t limit_;
};

}  // namespace remat::pytorch
