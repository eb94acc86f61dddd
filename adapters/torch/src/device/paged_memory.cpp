// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <map>
#include <mutex>
#include <remat/pytorch/device.hpp>
#include <remat/pytorch/paged_memory.hpp>
#include <unordered_set>

namespace remat::pytorch {
namespace paged_memory {
namespace {

struct mapping {
  bytes_t bytes;
  std::uint64_t mark;
};
struct mappings {
  std::mutex mutex;
  std::map<const char*, mapping> from;  ///< by first address
  std::uint64_t last = 0;
  std::atomic<bool> any = false;
};
mappings& of_process() {
  static auto* all = new mappings;  // never destroyed: tensors die after static objects
  return *all;
}

}  // namespace

std::uint64_t add(const void* begin, bytes_t bytes) {
  auto& all = of_process();
  const std::lock_guard lock(all.mutex);
  all.from[static_cast<const char*>(begin)] = {bytes, ++all.last};
  all.any = true;
  return all.last;
}

void remove(const void* begin, std::uint64_t mark) {
  auto& all = of_process();
  const std::lock_guard lock(all.mutex);
  const auto found = all.from.find(static_cast<const char*>(begin));
  if (found == all.from.end() || found->second.mark != mark) return;
  all.from.erase(found);
  all.any = !all.from.empty();
}

bool holds(const void* address) {
  auto& all = of_process();
  if (!all.any) return false;
  const auto* at = static_cast<const char*>(address);
  const std::lock_guard lock(all.mutex);
  const auto behind = all.from.upper_bound(at);
  if (behind == all.from.begin()) return false;
  const auto& [begin, found] = *std::prev(behind);
  return at - begin < found.bytes;
}
bool holds(const at::Tensor& t) {  // does not materialize copy-on-write storages
  return holds(t.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
}

}  // namespace paged_memory

bytes_t unpaged_bytes(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> seen;
  bytes_t sum = 0;
  for (const auto& t : tensors)
    if (t.defined() && t.has_storage() && seen.insert(t.storage().unsafeGetStorageImpl()).second && !paged_memory::holds(t))
      sum += allocated_bytes(t.device(), static_cast<bytes_t>(t.storage().nbytes()));
  return sum;
}

}  // namespace remat::pytorch
