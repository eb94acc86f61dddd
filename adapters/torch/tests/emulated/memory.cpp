// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of the emulated devices: one reservation of addresses. Tensors see the lower half, which nobody may access. The upper
/// half holds the bytes, at a constant distance.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "hardware.hpp"
#include "state.hpp"

namespace emulated {
namespace {

constexpr std::size_t space = std::size_t{1} << 36;           // addresses of each device
constexpr std::size_t half = space * device_count;            // all devices
constexpr std::size_t large = std::size_t{1} << 20;           // freed pieces of this size or more go back to the system
constexpr std::size_t most_poisoned = std::size_t{64} << 20;  // new pieces are poisoned up to this size
constexpr std::size_t page = 4096;
constexpr int poisoned_byte = 0xA5;

char* reserve() {
  void* const p = mmap(nullptr, 2 * half, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw failure("emulated: no address space is left");
  if (mprotect(static_cast<char*>(p) + half, half, PROT_READ | PROT_WRITE) != 0)
    throw failure("emulated: the system does not let memory be overcommitted");
  return static_cast<char*>(p);
}

char* base() {
  static char* const at = reserve();
  return at;
}

/// Pieces of the address space of a device. Adjacent free pieces are joined.
struct pool {
  std::map<char*, std::size_t> free, used;
  std::size_t used_bytes = 0, others = 0;
};

struct all_memory {
  std::mutex lock;
  pool device[device_count];
  std::map<const char*, std::size_t> pinned;
};

all_memory& memory() {
  static auto* const only = [] {
    auto* const m = new all_memory;
    for (int d = 0; d < device_count; ++d) m->device[d].free[base() + static_cast<std::size_t>(d) * space] = space;
    return m;
  }();
  return *only;
}

}  // namespace

std::mutex& memory_lock() { return memory().lock; }

namespace {

void forget(const void* data, std::size_t bytes) {
  const std::lock_guard guard(world_lock());
  accesses().forget(data, bytes);
}

/// Poisons freed memory. Whole pages of a large piece go back to the system, and read as zeros afterwards.
void give_back(char* begin, std::size_t bytes) {
  char* const end = begin + bytes;
  auto* const first = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page);
  auto* const last = reinterpret_cast<char*>(reinterpret_cast<std::uintptr_t>(end) / page * page);
  if (bytes < large || madvise(first, static_cast<std::size_t>(last - first), MADV_DONTNEED) != 0) {
    std::memset(begin, poisoned_byte, bytes);
    return;
  }
  std::memset(begin, poisoned_byte, static_cast<std::size_t>(first - begin));
  std::memset(last, poisoned_byte, static_cast<std::size_t>(end - last));
}

bool lies_in(const void* p, const char* begin, std::size_t bytes) {
  const auto* const c = static_cast<const char*>(p);
  return begin <= c && c < begin + bytes;
}

}  // namespace

void* allocate(int device, std::size_t bytes) {
  check_alive();
  const std::size_t size =
      std::max<std::size_t>(1, (bytes + allocation_alignment - 1) / allocation_alignment) * allocation_alignment;
  char* at = nullptr;
  {
    auto& m = memory();
    const std::lock_guard guard(m.lock);
    auto& p = m.device[device];
    const auto fits = std::find_if(p.free.begin(), p.free.end(), [&](const auto& f) { return f.second >= size; });
    if (p.used_bytes + p.others + size > total_bytes(device) || fits == p.free.end())
      throw out_of_memory("emulated: device " + std::to_string(device) + " has no " + std::to_string(size) + " bytes left");
    at = fits->first;
    const std::size_t rest = fits->second - size;
    p.free.erase(fits);
    if (rest > 0) p.free[at + size] = rest;
    p.used[at] = size;
    p.used_bytes += size;
  }
  std::memset(at + half, poisoned_byte, std::min(size, most_poisoned));
  forget(at, size);
  ++counting().allocations;
  return at;
}

void release(void* data) {
  if (data == nullptr || forked()) return;
  const int device = device_of(data);
  if (device < 0) throw failure("emulated: what is released is not memory of a device");
  if (options().lost == 0)
    for (int d = 0; d < device_count; ++d)
      for (const auto& s : streams_of(d)) s->drain();  // a copy between devices uses memory of both
  auto& m = memory();
  std::size_t size = 0;
  {
    const std::lock_guard guard(m.lock);
    auto& p = m.device[device];
    const auto piece = p.used.find(static_cast<char*>(data));
    if (piece == p.used.end()) throw failure("emulated: what is released has not been allocated");
    size = piece->second;
    p.used.erase(piece);
  }
  forget(data, size);
  char* begin = static_cast<char*>(data);
  give_back(begin + half, size);
  const std::lock_guard guard(m.lock);
  auto& p = m.device[device];
  p.used_bytes -= size;
  auto next = p.free.lower_bound(begin);
  if (next != p.free.end() && next->first == begin + size) {
    size += next->second;
    next = p.free.erase(next);
  }
  if (next != p.free.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      previous->second += size;
      return;
    }
  }
  p.free[begin] = size;
}

// --- page-locked memory of the host ------------------------------------------------------------------------------------------

void* allocate_pinned(std::size_t bytes) {
  check_alive();
  const std::size_t size = std::max<std::size_t>(1, bytes);
  void* const p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw out_of_memory("emulated: the host has no memory left");
  register_pinned(p, size);
  return p;
}

void release_pinned(void* data) {
  if (data == nullptr || forked()) return;
  if (options().lost == 0)
    for (int d = 0; d < device_count; ++d)
      for (const auto& s : streams_of(d)) s->drain();
  std::size_t size = 0;
  {
    const std::lock_guard guard(memory().lock);
    const auto piece = memory().pinned.find(static_cast<char*>(data));
    if (piece == memory().pinned.end()) throw failure("emulated: what is released is not page-locked");
    size = piece->second;
  }
  unregister_pinned(data);
  munmap(data, size);
}

void register_pinned(void* data, std::size_t bytes) {
  {
    const std::lock_guard guard(memory().lock);
    memory().pinned[static_cast<char*>(data)] = bytes;
  }
  forget(data, bytes);
}

void unregister_pinned(void* data) {
  std::size_t bytes = 0;
  {
    const std::lock_guard guard(memory().lock);
    const auto piece = memory().pinned.find(static_cast<char*>(data));
    if (piece == memory().pinned.end()) throw failure("emulated: this memory is not page-locked");
    bytes = piece->second;
    memory().pinned.erase(piece);
  }
  forget(data, bytes);
}

bool is_pinned(const void* p) {
  const std::lock_guard guard(memory().lock);
  const auto next = memory().pinned.upper_bound(static_cast<const char*>(p));
  return next != memory().pinned.begin() && lies_in(p, std::prev(next)->first, std::prev(next)->second);
}

// --- addresses ---------------------------------------------------------------------------------------------------------------

int device_of(const void* p) {
  if (!lies_in(p, base(), half)) return -1;
  return static_cast<int>(static_cast<std::size_t>(static_cast<const char*>(p) - base()) / space);
}

bool is_handle(const void* p) {
  const int device = device_of(p);
  const std::lock_guard guard(memory().lock);
  return device >= 0 && memory().device[device].used.count(static_cast<char*>(const_cast<void*>(p))) != 0;
}

char* kernel_address(const void* p) {
  auto* const c = static_cast<char*>(const_cast<void*>(p));
  return device_of(p) < 0 ? c : c + half;
}

bool is_kernel_address(const void* p) { return lies_in(p, base() + half, half); }

void* device_address(const void* kernel_address) {
  auto* const c = static_cast<char*>(const_cast<void*>(kernel_address));
  return is_kernel_address(kernel_address) ? c - half : c;
}

std::size_t used_bytes(int device) {
  const std::lock_guard guard(memory().lock);
  return memory().device[device].used_bytes + memory().device[device].others;
}

std::size_t total_bytes(int) { return std::min(space, static_cast<std::size_t>(options().bytes.load())); }

void take_for_others(int device, std::size_t bytes) {
  const std::lock_guard guard(memory().lock);
  memory().device[device].others = bytes;
}

}  // namespace emulated
