// SPDX-License-Identifier: Apache-2.0
/// @file
/// The environment that costs depend on, and the folder of caches. Private to the adapter.
#pragma once

#include <ATen/Parallel.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include <remat/pytorch/device.hpp>

#include "../base/key.hpp"

namespace remat::pytorch {

/// PyTorch version, processor, threads, the device if it is not the host, and a digest of settings that choose kernels.
inline std::string environment(device& on) {
  std::string processor = "unknown processor";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.rfind("model name", 0) == 0) {
      processor = line.substr(std::min(line.size(), line.find(':') + 2));
      break;
    }
  key settings;
  add_kernel_settings(settings);
  return std::string("torch ") + TORCH_VERSION + ", " + processor + ", " + std::to_string(at::get_num_threads()) + " threads" +
         (on.which().is_cpu() ? "" : ", " + on.memory().name() + (on.can_place() ? "" : ", placed by its allocator")) +
         ", settings " + std::to_string(std::hash<std::string>{}(settings.bytes()));
}

/// `$XDG_CACHE_HOME/remat`, else `~/.cache/remat`, else nothing.
inline std::filesystem::path cache_folder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != 0)
    return std::filesystem::path(cache) / "remat";
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != 0)
    return std::filesystem::path(home) / ".cache" / "remat";
  return {};
}

}  // namespace remat::pytorch
