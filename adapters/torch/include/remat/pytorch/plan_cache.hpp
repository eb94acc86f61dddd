// SPDX-License-Identifier: Apache-2.0
/// @file
/// Plans that were searched once, kept in files.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/pytorch/program.hpp>

namespace remat::pytorch {

/// A folder of schedules, a file each (remat-schedule), by what they depend on. Several processes may use one.
///
/// A cache costs time at worst: a file that is missing, damaged or cannot be written is no error, and what is found is a claim
/// that the caller judges as it judges a solver's answer.
class plan_cache {
 public:
  /// @param folder made when first needed; empty: nothing is kept
  /// @param limit  bytes of all files together; those used least recently go
  explicit plan_cache(std::filesystem::path folder = default_folder(), bytes_t limit = bytes_t{64} << 20)
      : folder_(std::move(folder)), limit_(limit) {}

  /// `$XDG_CACHE_HOME/remat/plans`, else `~/.cache/remat/plans`, else none.
  static std::filesystem::path default_folder();

  /// What a plan depends on: the program but for names and contents, PyTorch, processor, threads, budget and solver.
  /// @param available budget of the step, bytes
  /// @param solver    name and options
  /// @return nothing if nothing is to be kept: no folder, no name, or a program that no document holds
  /// Complexity: linear in the text of the program.
  std::optional<std::string> key(const program& step, bytes_t available, const std::string& solver, const limits& l) const;

  /// The result stored under a key, times and bounds being those of then. It is used now.
  std::optional<result> find(const std::string& key) const;
  /// Writes a result as a whole or not at all, and removes others beyond the limit.
  void store(const std::string& key, const result& found) const;

 private:
  std::filesystem::path file(const std::string& key) const { return folder_ / (key + ".json"); }
  void trim() const;

  std::filesystem::path folder_;
  bytes_t limit_;
};

}  // namespace remat::pytorch
