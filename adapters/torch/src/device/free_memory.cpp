// SPDX-License-Identifier: Apache-2.0
#include "free_memory.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include <remat/pytorch/free_memory.hpp>

namespace remat::pytorch {
namespace {

/// The number in a file; nothing for "max", or without the file.
std::optional<bytes_t> number_in(const std::filesystem::path& file) {
  std::ifstream in(file);
  bytes_t number = 0;
  return in >> number ? std::optional(number) : std::nullopt;
}

/// The number behind a word, in a file of words and numbers.
std::optional<bytes_t> number_behind(const std::filesystem::path& file, const std::string& word) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);)
    if (line.starts_with(word + ' ')) return std::stoll(line.substr(word.size()));
  return std::nullopt;
}

/// A cgroup with a memory limit.
struct memory_group {
  bytes_t limit;
  bytes_t used;  ///< bytes in use that the system cannot easily reclaim
};

/// The limited cgroups of this process, parents included.
std::vector<memory_group> memory_groups() {
  std::vector<memory_group> found;
  const std::filesystem::path root = root_of_system();
  std::ifstream list(root / "proc/self/cgroup");
  for (std::string line; std::getline(list, line);) {  // number:kinds:folder
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const auto kinds = ',' + line.substr(first + 1, second - first - 1) + ',';
    const bool second_version = kinds == ",,";
    if (!second_version && kinds.find(",memory,") == kinds.npos) continue;
    const auto top = root / (second_version ? "sys/fs/cgroup" : "sys/fs/cgroup/memory");
    const auto* limit_file = second_version ? "memory.max" : "memory.limit_in_bytes";
    const auto* usage_file = second_version ? "memory.current" : "memory.usage_in_bytes";
    const auto* idle_file = second_version ? "inactive_file" : "total_inactive_file";
    for (auto group = top / std::filesystem::path(line.substr(second + 1)).relative_path();; group = group.parent_path()) {
      const auto limit = number_in(group / limit_file), used = number_in(group / usage_file);
      if (limit && used)
        found.push_back({*limit, std::max<bytes_t>(0, *used - number_behind(group / "memory.stat", idle_file).value_or(0))});
      if (group == top) break;
    }
  }
  return found;
}

bytes_t of_machine(const std::string& word) {
  const auto kib = number_behind(std::filesystem::path(root_of_system()) / "proc/meminfo", word + ':');
  return kib ? *kib * 1024 : max_bytes;
}

}  // namespace

std::string& root_of_system() {
  static std::string folder = "/";
  return folder;
}

bytes_t host_limit() {
  auto bytes = of_machine("MemTotal");
  for (const auto& group : memory_groups()) bytes = std::min(bytes, group.limit);
  return bytes;
}

bytes_t host_free() {
  auto bytes = of_machine("MemAvailable");
  for (const auto& group : memory_groups()) bytes = std::min(bytes, group.limit - group.used);
  return std::max<bytes_t>(0, bytes);
}

}  // namespace remat::pytorch
