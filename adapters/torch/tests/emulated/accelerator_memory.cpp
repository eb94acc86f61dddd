// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of the accelerator: a caching allocator for the devices, and one for page-locked memory of the host.
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "accelerator.hpp"

namespace emulated::accelerator {
namespace {

using statistics = c10::CachingDeviceAllocator::DeviceStats;
constexpr c10::MempoolId_t no_pool = {0, 0};

struct block {
  void* data = nullptr;
  std::size_t bytes = 0, asked = 0;
  c10::DeviceIndex device = 0;
  stream* of = nullptr;
  c10::MempoolId_t pool = no_pool;
  std::set<stream*> used_in;                   ///< by `record_stream`
  std::vector<std::shared_ptr<event>> events;  ///< recorded in the streams of `used_in` after the block was freed
};

class caching final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto device = current_device();
    void* const p = bytes == 0 ? nullptr : take(bytes, device, stream_of(current_stream(device)));
    return {p, p, &release, c10::Device(kind, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return option::get("handles") != 0 ? nullptr : &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    copy(to, from, bytes, stream_of(current_stream(current_device())));
  }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t pool) override {
    const std::lock_guard guard(lock_);
    collect(true);
    for (c10::DeviceIndex d = 0; d < device_count; ++d) return_cached(d, pool);
  }

  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    const std::lock_guard guard(lock_);
    const auto found = live_.find(p.get());
    if (found == live_.end()) return;
    if (auto& used = stream_of(s); &used != found->second.of) found->second.used_in.insert(&used);
  }

  statistics getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard guard(lock_);
    return of(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard guard(lock_);
    auto& s = of(device);
    for (auto* const a : arrays(s)) a->at(0).reset_accumulated();
    s.num_alloc_retries = s.num_ooms = s.num_device_alloc = s.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard guard(lock_);
    for (auto* const a : arrays(of(device))) a->at(0).reset_peak();
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto total = total_bytes(device), used = used_bytes(device);
    return {used < total ? total - used : 0, total};
  }

  void use(unsigned long long capture, c10::MempoolId_t pool) {
    const std::lock_guard guard(lock_);
    captures_[capture] = pool;
    ++users_[pool];
  }
  void leave(unsigned long long capture) {
    const std::lock_guard guard(lock_);
    captures_.erase(capture);
  }
  void release_pool(c10::MempoolId_t pool) {
    const std::lock_guard guard(lock_);
    if (--users_[pool] > 0) return;
    users_.erase(pool);
    for (c10::DeviceIndex d = 0; d < device_count; ++d) return_cached(d, pool);
    for (auto& [data, b] : live_)
      if (b.pool == pool) b.pool = no_pool;
    for (auto& b : waiting_)
      if (b.pool == pool) b.pool = no_pool;
  }

 private:
  using shelf = std::tuple<c10::DeviceIndex, c10::MempoolId_t, stream*, std::size_t>;

  static std::vector<c10::CachingAllocator::StatArray*> arrays(statistics& s) {
    return {&s.allocation,     &s.segment,      &s.active,          &s.inactive_split,      &s.allocated_bytes,
            &s.reserved_bytes, &s.active_bytes, &s.requested_bytes, &s.inactive_split_bytes};
  }
  statistics& of(c10::DeviceIndex device) { return statistics_.at(static_cast<std::size_t>(device)); }

  static void release(void* data);

  void* take(std::size_t asked, c10::DeviceIndex device, stream& s) {
    const auto bytes = (asked + allocation_alignment - 1) / allocation_alignment * allocation_alignment;
    const auto capture = capture_id(s);
    const std::lock_guard guard(lock_);
    collect(false);
    const auto pool = captures_.count(capture) != 0 ? captures_[capture] : no_pool;
    block b;
    if (auto& cached = cached_[{device, pool, &s, bytes}]; !cached.empty()) {
      b = std::move(cached.back());
      cached.pop_back();
    } else {
      b.data = reserve(bytes, device);
      of(device).reserved_bytes[0].increase(bytes);
      of(device).segment[0].increase(1);
      ++of(device).num_device_alloc;
    }
    b.bytes = bytes, b.asked = asked, b.device = device, b.of = &s, b.pool = pool;
    auto& stats = of(device);
    stats.allocation[0].increase(1), stats.active[0].increase(1);
    stats.allocated_bytes[0].increase(bytes), stats.active_bytes[0].increase(bytes), stats.requested_bytes[0].increase(asked);
    void* const data = b.data;
    live_.emplace(data, std::move(b));
    return data;
  }

  void* reserve(std::size_t bytes, c10::DeviceIndex device) {
    try {
      return emulated::allocate(device, bytes);
    } catch (const out_of_memory&) {
      ++of(device).num_alloc_retries;
    }
    collect(true);
    return_cached(device, no_pool);
    try {
      return emulated::allocate(device, bytes);
    } catch (const out_of_memory&) {
      ++of(device).num_ooms;
      const auto free = getMemoryInfo(device).first;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "emulated out of memory. Tried to allocate ", bytes, " bytes. Device ",
                       static_cast<int>(device), " has ", free, " bytes free, and PyTorch has allocated ",
                       of(device).allocated_bytes[0].current, " bytes.");
    }
  }

  void give_back(void* data) {
    const std::lock_guard guard(lock_);
    const auto found = live_.find(data);
    TORCH_CHECK(found != live_.end(), "emulated: what is freed has not been allocated");
    block b = std::move(found->second);
    live_.erase(found);
    auto& stats = of(b.device);
    stats.allocation[0].decrease(1);
    stats.allocated_bytes[0].decrease(b.bytes), stats.requested_bytes[0].decrease(b.asked);
    if (b.used_in.empty()) return shelve(std::move(b));
    waiting_.push_back(std::move(b));
    collect(false);
  }

  void shelve(block b) {
    of(b.device).active[0].decrease(1);
    of(b.device).active_bytes[0].decrease(b.bytes);
    const shelf at{b.device, b.pool, b.of, b.bytes};
    cached_[at].push_back(std::move(b));
  }

  /// Moves blocks that other streams have finished with to the cache.
  void collect(bool wait) {
    std::vector<block> still;
    for (auto& b : std::exchange(waiting_, {}))
      if (finished(b, wait))
        shelve(std::move(b));
      else
        still.push_back(std::move(b));
    waiting_ = std::move(still);
  }

  static bool finished(block& b, bool wait) {
    if (std::any_of(b.used_in.begin(), b.used_in.end(), [](const stream* s) { return capturing(*s); })) return false;
    for (auto* const s : std::exchange(b.used_in, {})) {
      b.events.push_back(make_event());
      record(*b.events.back(), *s);
    }
    if (wait)
      for (const auto& e : b.events) synchronize(*e);
    if (!std::all_of(b.events.begin(), b.events.end(), [](const auto& e) { return reached(*e); })) return false;
    b.events.clear();
    return true;
  }

  void return_cached(c10::DeviceIndex device, c10::MempoolId_t pool) {
    for (auto& [at, blocks] : cached_) {
      if (std::get<0>(at) != device || std::get<1>(at) != pool) continue;
      for (const auto& b : std::exchange(blocks, {})) {
        emulated::release(b.data);
        of(device).reserved_bytes[0].decrease(b.bytes);
        of(device).segment[0].decrease(1);
        ++of(device).num_device_free;
      }
    }
  }

  std::mutex lock_;
  std::unordered_map<void*, block> live_;
  std::map<shelf, std::vector<block>> cached_;
  std::vector<block> waiting_;
  std::map<unsigned long long, c10::MempoolId_t> captures_;
  std::map<c10::MempoolId_t, int> users_;
  std::array<statistics, device_count> statistics_;
};

caching& instance() {
  static auto* const only = new caching;  // never destroyed: tensors die after static objects
  return *only;
}

/// Destructors call this. Memory of a lost device is not given back.
void caching::release(void* data) {
  if (data == nullptr) return;
  try {
    instance().give_back(data);
  } catch (const failure&) {
  }
}

class pinning final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const p = bytes == 0 ? nullptr : allocate_pinned(bytes);
    if (p != nullptr) {
      const std::lock_guard guard(lock_);
      sizes_[p] = bytes;
      statistics_.active_requests.increase(1), statistics_.active_bytes.increase(bytes);
      statistics_.allocations.increase(1), statistics_.allocated_bytes.increase(bytes);
    }
    return {p, p, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // `release` waits for all streams
  void empty_cache() override {}
  at::HostStats get_stats() override {
    const std::lock_guard guard(lock_);
    return statistics_;
  }
  void reset_accumulated_stats() override {
    const std::lock_guard guard(lock_);
    for (auto* const s : all()) s->reset_accumulated();
  }
  void reset_peak_stats() override {
    const std::lock_guard guard(lock_);
    for (auto* const s : all()) s->reset_peak();
  }

 private:
  std::vector<c10::CachingAllocator::Stat*> all() {
    return {&statistics_.active_requests, &statistics_.active_bytes, &statistics_.allocations, &statistics_.allocated_bytes};
  }
  static void release(void* data) {
    if (data == nullptr) return;
    release_pinned(data);
    auto& self = static_cast<pinning&>(pinned_allocator());
    const std::lock_guard guard(self.lock_);
    const auto bytes = self.sizes_[data];
    self.sizes_.erase(data);
    self.statistics_.active_requests.decrease(1), self.statistics_.active_bytes.decrease(bytes);
    self.statistics_.allocations.decrease(1), self.statistics_.allocated_bytes.decrease(bytes);
  }
  std::mutex lock_;
  std::unordered_map<void*, std::size_t> sizes_;
  at::HostStats statistics_;
};

}  // namespace

c10::DeviceAllocator& device_allocator() { return instance(); }
at::HostAllocator& pinned_allocator() {
  static auto* const only = new pinning;
  return *only;
}
void use_pool(unsigned long long capture, c10::MempoolId_t pool) { instance().use(capture, pool); }
void leave_pool(unsigned long long capture) { instance().leave(capture); }
void release_pool(c10::MempoolId_t pool) { instance().release_pool(pool); }

}  // namespace emulated::accelerator
