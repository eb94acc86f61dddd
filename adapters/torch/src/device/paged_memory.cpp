// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <map>
#include <mutex>
#include <remat/pytorch/paged_memory.hpp>

namespace remat::pytorch::paged_memory {
namespace {

struct mappings {
  std::mutex mutex;
  std::map<const char*, bytes_t> bytes;  ///< by where they begin
  std::atomic<bool> any = false;
};
mappings& of_process() {
  static auto* all = new mappings;  // tensors may outlive what is destroyed when the process ends
  return *all;
}

}  // namespace

void add(const void* begin, bytes_t bytes) {
  auto& all = of_process();
  const std::lock_guard lock(all.mutex);
  all.bytes[static_cast<const char*>(begin)] = bytes;
  all.any = true;
}

void remove(const void* begin) {
  auto& all = of_process();
  const std::lock_guard lock(all.mutex);
  all.bytes.erase(static_cast<const char*>(begin));
  all.any = !all.bytes.empty();
}

bool holds(const void* address) {
  auto& all = of_process();
  if (!all.any) return false;
  const auto* at = static_cast<const char*>(address);
  const std::lock_guard lock(all.mutex);
  const auto behind = all.bytes.upper_bound(at);
  if (behind == all.bytes.begin()) return false;
  const auto& [begin, bytes] = *std::prev(behind);
  return at - begin < bytes;
}

}  // namespace remat::pytorch::paged_memory
