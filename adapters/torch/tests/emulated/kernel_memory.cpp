// SPDX-License-Identifier: Apache-2.0
/// @file
/// The allocator in front of the allocator of the host. Inside kernels it gives memory of the device, at addresses of kernels.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "host_side.hpp"
#include "kernels.hpp"

namespace emulated {
namespace {

thread_local const backend* inside = nullptr;
thread_local std::vector<range>* used_inside = nullptr;
thread_local blank_memory* blank_inside = nullptr;

/// Memory that kernels have allocated and still hold, by the address that the kernel uses.
struct held_memory {
  std::mutex lock;
  std::unordered_map<void*, c10::DataPtr> pieces;
  std::unordered_set<void*> blank;  ///< freed by a `blank_memory`
};
held_memory& held() {
  static auto* const only = new held_memory;
  return *only;
}

void* allocate_on_device(const backend& on, std::size_t bytes) {
  auto data = c10::GetAllocator(on.type())->allocate(bytes);
  used_inside->push_back({data.get(), bytes});
  void* const p = blank_inside != nullptr ? blank_inside->allocate(bytes) : kernel_address(data.get());
  const std::lock_guard guard(held().lock);
  held().pieces.emplace(p, std::move(data));
  return p;
}

bool is_blank(void* p) {
  const std::lock_guard guard(held().lock);
  return held().blank.count(p) != 0;
}

class kernel_allocator final : public c10::Allocator {
 public:
  kernel_allocator(c10::Allocator* base, c10::DeleterFnPtr deleter) : base_(base), deleter_(deleter) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (inside == nullptr || bytes == 0) return base_->allocate(bytes);
    const backend& on = *std::exchange(inside, nullptr);  // the allocator of the device runs outside of kernels
    void* p = nullptr;
    try {
      p = allocate_on_device(on, bytes);
    } catch (...) {
      inside = &on;
      throw;
    }
    inside = &on;
    return {p, p, deleter_, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return deleter_; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  void release(void* data) {
    if (taken_from_kernel(data) || is_kernel_address(data) || is_blank(data)) return;  // the device owns the memory now
    base_->raw_deallocate(data);
  }
  c10::Allocator* base() const { return base_; }

 private:
  c10::Allocator* base_;
  c10::DeleterFnPtr deleter_;
};

/// One allocator of ours for each allocator that was installed before. Deleters are plain functions, so each needs its own.
constexpr std::size_t most = 8;
std::array<kernel_allocator*, most> fronts{};
template <std::size_t k>
void release_of(void* data) {
  if (data != nullptr) fronts[k]->release(data);
}
template <std::size_t... k>
c10::DeleterFnPtr deleter_of(std::size_t which, std::index_sequence<k...>) {
  static constexpr std::array<c10::DeleterFnPtr, most> all = {&release_of<k>...};
  return all[which];
}

/// Installs `a` for host memory, with the lowest priority that suffices, so that others can still be installed.
void set_allocator(c10::Allocator* a) {
  static int priority = 0;
  for (; priority < 256; ++priority) {
    c10::SetCPUAllocator(a, static_cast<std::uint8_t>(priority));
    if (c10::GetCPUAllocator() == a) return;
  }
  TORCH_CHECK(false, "emulated: the allocator of the host cannot be replaced");
}

/// Keeps our allocator installed only while kernels run, because other code may check which allocator is installed. Threads
/// outside of kernels are not affected.
class presence {
 public:
  void enter() {
    const std::lock_guard guard(lock_);
    ++kernels_;
    auto* const now = c10::GetCPUAllocator();
    if (std::none_of(fronts.begin(), fronts.end(), [&](const auto* f) { return f == now; })) set_allocator(&before(now));
  }
  void leave() {
    const std::lock_guard guard(lock_);
    if (--kernels_ > 0) return;
    auto* const now = c10::GetCPUAllocator();
    for (const auto* f : fronts)
      if (f != nullptr && f == now) return set_allocator(f->base());
  }

 private:
  static kernel_allocator& before(c10::Allocator* base) {
    for (std::size_t k = 0; k < most; ++k) {
      if (fronts[k] == nullptr) fronts[k] = new kernel_allocator(base, deleter_of(k, std::make_index_sequence<most>()));
      if (fronts[k]->base() == base) return *fronts[k];
    }
    TORCH_CHECK(false, "emulated: the host has had too many allocators");
  }

  std::mutex lock_;
  int kernels_ = 0;
} present;

}  // namespace

std::optional<c10::DataPtr> taken_from_kernel(void* kernel_address) {
  const std::lock_guard guard(held().lock);
  const auto piece = held().pieces.find(kernel_address);
  if (piece == held().pieces.end()) return std::nullopt;
  auto data = std::move(piece->second);
  held().pieces.erase(piece);
  return data;
}

void* blank_memory::allocate(std::size_t bytes) {
  pieces_.push_back(std::make_unique<std::max_align_t[]>(bytes / sizeof(std::max_align_t) + 1));
  const std::lock_guard guard(held().lock);
  held().blank.insert(pieces_.back().get());
  return pieces_.back().get();
}

blank_memory::~blank_memory() {
  const std::lock_guard guard(held().lock);
  for (const auto& p : pieces_) held().blank.erase(p.get());
}

inside_kernel::inside_kernel(const backend& on, std::vector<range>& used, blank_memory* blank)
    : outer_(std::exchange(inside, &on)),
      outer_used_(std::exchange(used_inside, &used)),
      outer_blank_(std::exchange(blank_inside, blank)) {
  present.enter();
}
inside_kernel::~inside_kernel() {
  present.leave();
  inside = outer_;
  used_inside = outer_used_;
  blank_inside = outer_blank_;
}

}  // namespace emulated
