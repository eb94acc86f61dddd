// SPDX-License-Identifier: Apache-2.0
#include <c10/core/CPUAllocator.h>
#include <c10/util/ScopeExit.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include <remat/pytorch/memory.hpp>

#include "allocator.hpp"

namespace remat::pytorch {
namespace {

std::atomic<bytes_t> live_bytes{0}, peak_bytes{0};
std::atomic<int> meters{0};
std::atomic<bool> observed{false};
std::mutex observer_mutex;
std::function<void(bytes_t)> observer;

/// The recording and the plan that are active on a thread.
struct activity {
  allocation_recording* record;
  planned_allocations* plan;
  bool uncounted;
  bool observing;
};
thread_local constinit activity of_thread{nullptr, nullptr, false, false};

/// Sizes of the counted blocks that are alive, by address.
class sizes {
 public:
  void lock() {
    for (auto& p : parts_) p.mutex.lock();
  }
  void unlock() {
    for (auto& p : parts_) p.mutex.unlock();
  }
  void add(const void* data, bytes_t bytes) {
    auto& s = shard(data);
    std::lock_guard lock(s.mutex);
    s.bytes[data] = bytes;
  }
  bytes_t take(const void* data) {
    auto& s = shard(data);
    std::lock_guard lock(s.mutex);
    const auto found = s.bytes.find(data);
    if (found == s.bytes.end()) return 0;
    const auto bytes = found->second;
    s.bytes.erase(found);
    return bytes;
  }

 private:
  struct part {
    std::mutex mutex;
    std::unordered_map<const void*, bytes_t> bytes;
  };
  part& shard(const void* data) { return parts_[(reinterpret_cast<std::uintptr_t>(data) >> 6) % parts_.size()]; }
  std::array<part, 32> parts_;
};

class host_allocator final : public c10::Allocator {
 public:
  /// The allocator of this process. Never destroyed: tensors die after static objects.
  static host_allocator& instance() {
    static auto* const only = new host_allocator(c10::GetCPUAllocator());
    return *only;
  }

  c10::DataPtr allocate(std::size_t n) override {
    auto* const record = detail::recording_on(c10::kCPU);
    auto* const plan = detail::plan_on(c10::kCPU);
    const bool counted = meters.load(std::memory_order_relaxed) > 0 && !of_thread.uncounted;
    if (n == 0 || (record == nullptr && plan == nullptr && !counted)) return base_->allocate(n);
    const auto bytes = static_cast<bytes_t>(n);
    if (plan != nullptr)
      if (const auto place = plan->place(bytes); place && *place != nullptr) return {*place, *place, &release_planned, c10::kCPU};
    void* data = base_->raw_allocate(n);
    if (counted) {
      sizes_.add(data, bytes);
      detail::count(bytes);
    }
    if (record != nullptr) record->born(data, bytes);
    if (plan != nullptr) plan->born(data, bytes);
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }

  c10::Allocator* base() const { return base_; }

  /// Registers the address range of an arena. Blocks in it are not given back to the base allocator.
  void add_arena(const char* data, bytes_t bytes) {
    std::lock_guard lock(arenas_mutex_);
    arenas_.emplace_back(data, data + bytes);
  }
  void remove_arena(const char* data) {
    std::lock_guard lock(arenas_mutex_);
    std::erase_if(arenas_, [&](const auto& a) { return a.first == data; });
  }

  bool in_arena(const void* data) {
    std::lock_guard lock(arenas_mutex_);
    return std::any_of(arenas_.begin(), arenas_.end(), [&](const auto& a) { return a.first <= data && data < a.second; });
  }

 private:
  explicit host_allocator(c10::Allocator* base) : base_(base) {
    TORCH_CHECK(base->raw_deleter() != nullptr, "the host allocator in use has no raw_deleter: memory cannot be measured");
    // A forked child has one thread only. A lock that another thread held would stay locked, so `fork` waits for all locks.
    pthread_atfork([] { instance().lock(); }, [] { instance().unlock(); }, [] { instance().unlock(); });
  }
  void lock() {
    observer_mutex.lock();
    arenas_mutex_.lock();
    sizes_.lock();
  }
  void unlock() {
    sizes_.unlock();
    arenas_mutex_.unlock();
    observer_mutex.unlock();
  }

  static void release_planned(void* data) {
    if (auto* const plan = detail::plan_on(c10::kCPU)) plan->died(data);
  }
  static void release(void* data) {
    if (data == nullptr) return;
    auto& self = instance();
    const auto bytes = self.sizes_.take(data);
    if (bytes == 0 && self.in_arena(data)) return release_planned(data);  // freed through raw_deallocate
    if (auto* const plan = detail::plan_on(c10::kCPU)) plan->died(data);
    if (auto* const record = detail::recording_on(c10::kCPU)) record->died(data);
    if (bytes > 0) detail::count(-bytes);
    self.base_->raw_deallocate(data);
  }

  c10::Allocator* base_;
  sizes sizes_;
  std::mutex arenas_mutex_;
  std::vector<std::pair<const char*, const char*>> arenas_;
};

}  // namespace

void detail::count(bytes_t change) {
  const auto now = live_bytes += change;
  meter::raise_peak(now);
  if (observed.load(std::memory_order_relaxed) && !of_thread.observing) {
    std::lock_guard lock(observer_mutex);
    of_thread.observing = true;
    const auto ended = c10::make_scope_exit([] { of_thread.observing = false; });
    if (observer) observer(now);
  }
}
detail::uncounted::uncounted() : before_(std::exchange(of_thread.uncounted, true)) {}
detail::uncounted::~uncounted() { of_thread.uncounted = before_; }
void detail::add_arena(const char* data, bytes_t bytes) { host_allocator::instance().add_arena(data, bytes); }
void detail::remove_arena(const char* data) { host_allocator::instance().remove_arena(data); }
bool detail::in_arena(const void* data) { return host_allocator::instance().in_arena(data); }
pytorch::allocation_recording* detail::recording_on(c10::Device on) {
  return of_thread.record != nullptr && !of_thread.observing && of_thread.record->on() == on ? of_thread.record : nullptr;
}
planned_allocations* detail::plan_on(c10::Device on) {
  return of_thread.plan != nullptr && !of_thread.observing && of_thread.plan->on() == on ? of_thread.plan : nullptr;
}
void detail::died_on(c10::DeviceType kind, const void* data) {
  if (of_thread.plan != nullptr && of_thread.plan->on().type() == kind) of_thread.plan->died(data);
  if (of_thread.record != nullptr && of_thread.record->on().type() == kind) of_thread.record->died(data);
}

namespace {
std::atomic<bool (*)(c10::Device)> idle_arenas{nullptr};
}
void detail::set_idle_arenas(bool (*f)(c10::Device)) { idle_arenas = f; }
bool detail::return_idle_arenas(c10::Device on) {
  const auto f = idle_arenas.load();
  return f != nullptr && f(on);
}

void placing_allocator::install() {
  static const bool done = [] {
    c10::SetCPUAllocator(&host_allocator::instance(), 100);
    return true;
  }();
  static_cast<void>(done);
}

bool placing_allocator::in_front() { return c10::GetCPUAllocator() == &host_allocator::instance(); }

meter::meter() {
  placing_allocator::install();
  ++meters;
}
meter::~meter() { --meters; }
void meter::install() {
  static const auto* const forever = new meter;
  static_cast<void>(forever);
}

bytes_t meter::live() { return live_bytes; }
bytes_t meter::peak() { return peak_bytes; }
void meter::reset_peak() { peak_bytes = live_bytes.load(); }
void meter::raise_peak(bytes_t to) {
  for (auto peak = peak_bytes.load(std::memory_order_relaxed); peak < to && !peak_bytes.compare_exchange_weak(peak, to);) {
  }
}

void meter::observe(std::function<void(bytes_t)> f) {
  static std::unique_ptr<meter> counting;
  std::lock_guard lock(observer_mutex);
  if (!f != !counting) counting = f ? std::make_unique<meter>() : nullptr;
  observer = std::move(f);
  observed = static_cast<bool>(observer);
}

void allocation_recording::start() { of_thread.record = this; }
void allocation_recording::stop() {
  if (of_thread.record == this) of_thread.record = nullptr;
}
void allocation_recording::born(const void* data, bytes_t bytes) {
  alive_[data] = blocks_.size();
  blocks_.push_back({bytes, events_++, -1, data});
}
void allocation_recording::died(const void* data) {
  const auto found = alive_.find(data);
  if (found == alive_.end()) return;
  blocks_[found->second].freed = events_++;
  alive_.erase(found);
}

void planned_allocations::start() { of_thread.plan = this; }
void planned_allocations::stop() {
  if (of_thread.plan == this) of_thread.plan = nullptr;
  unplanned_blocks_.clear();  // results, which the executor moves to their places
  live_unplanned_ = 0;
}
outside_of_plan::outside_of_plan() : before_(std::exchange(of_thread.plan, nullptr)) {}
outside_of_plan::~outside_of_plan() { of_thread.plan = before_; }

std::optional<char*> planned_allocations::place(bytes_t bytes) {
  if (!off_plan_ && next_ < blocks_.size() && blocks_[next_].bytes == bytes && blocks_[next_].deaths == deaths_) {
    const auto& b = blocks_[next_++];
    if (b.dies && b.place != nullptr) live_temporaries_.push_back(b.place);
    return b.place;
  }
  off_plan_ = true;
  ++unplanned_allocations_;
  return std::nullopt;
}

void planned_allocations::born(const void* data, bytes_t bytes) {
  if (!off_plan_) return;
  unplanned_blocks_[data] = bytes;
  live_unplanned_ += bytes;
  peak_unplanned_ = std::max(peak_unplanned_, live_unplanned_);
}

bytes_t planned_allocations::unplanned_bytes() const {
  bytes_t expected = 0;
  for (auto k = next_; k < blocks_.size(); ++k)
    if (blocks_[k].place == nullptr) expected += blocks_[k].bytes;
  return std::max<bytes_t>(0, peak_unplanned_ - expected);
}

void planned_allocations::died(const void* data) {
  ++deaths_;
  if (const auto block = unplanned_blocks_.find(data); block != unplanned_blocks_.end()) {
    live_unplanned_ -= block->second;
    unplanned_blocks_.erase(block);
  }
  if (const auto found = std::find(live_temporaries_.begin(), live_temporaries_.end(), data); found != live_temporaries_.end())
    live_temporaries_.erase(found);
}

}  // namespace remat::pytorch
