// SPDX-License-Identifier: Apache-2.0
#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <algorithm>

#include <remat/pytorch/memory.hpp>

#include "allocator.hpp"

namespace remat::pytorch {
namespace {

bytes_t page_up(bytes_t bytes) {
  const auto page = static_cast<bytes_t>(arena::alignment);
  return (bytes + page - 1) / page * page;
}

/// Tells PyTorch's profiler of memory that does not come from its allocator.
void tell_profiler(void* data, bytes_t change) {
  c10::reportMemoryUsageToProfiler(data, change, static_cast<std::size_t>(meter::live()), 0, c10::kCPU);
}

}  // namespace

arena::arena(bytes_t bytes) : bytes_(bytes), counted_(bytes) {
  placing_allocator::install();
  constexpr std::size_t huge = std::size_t{2} << 20;
  const auto size = static_cast<std::size_t>(page_up(std::max<bytes_t>(bytes, 1)));
  reserved_ = size < huge ? size : size + huge;  // room to align to a huge page
  void* memory = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw out_of_memory("the host", bytes, 0);
  data_ = static_cast<char*>(memory);
  if (size >= huge) {
    const auto skip = (huge - reinterpret_cast<std::uintptr_t>(data_) % huge) % huge;
    if (skip > 0) munmap(data_, skip);
    data_ += skip;
    reserved_ -= skip;
    if (reserved_ > size) munmap(data_ + size, reserved_ - size);
    reserved_ = size;
    madvise(data_, reserved_, MADV_HUGEPAGE);
  }
  detail::add_arena(data_, bytes_);
  detail::count(bytes_);
  tell_profiler(data_, bytes_);
}

arena::~arena() {
  detail::remove_arena(data_);
  munmap(data_, reserved_);
  detail::count(-counted_);
  tell_profiler(data_, -counted_);
}

void arena::discard_except(std::vector<std::pair<bytes_t, bytes_t>> ranges) {
  const auto page = static_cast<bytes_t>(alignment);
  std::sort(ranges.begin(), ranges.end());
  ranges.emplace_back(page_up(bytes_), 0);
  bytes_t kept = 0, end = 0;  // bytes on kept pages; end of the last kept page
  for (const auto& [offset, bytes] : ranges) {
    const auto first = std::max(end, offset / page * page);
    if (first > end) madvise(data_ + end, static_cast<std::size_t>(first - end), MADV_DONTNEED);
    const auto last = std::max(end, page_up(offset + bytes));
    if (bytes > 0) kept += last - first;
    end = last;
  }
  kept = std::min(kept, counted_);
  const auto change = kept - counted_;
  counted_ = kept;
  detail::count(change);
  tell_profiler(data_, change);
}

}  // namespace remat::pytorch
