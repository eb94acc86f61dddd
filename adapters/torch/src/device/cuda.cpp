// SPDX-License-Identifier: Apache-2.0
#include "cuda.hpp"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include <remat/cuda/device.hpp>
#include <remat/pytorch/memory.hpp>

#include "allocator.hpp"
#include "streams.hpp"

namespace remat::pytorch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using pool_id = c10::MempoolId_t;

/// PyTorch's allocator, but on threads with a plan or a recording.
class cuda_allocator final : public caching::CUDAAllocator {
 public:
  /// The one of this process. Never destroyed: tensors die after static objects.
  static cuda_allocator& instance() {
    static auto* const only = [] {
      auto* const made = new cuda_allocator(caching::get());
      caching::allocator = made;
      c10::SetAllocator(c10::kCUDA, made, 10);
      return made;
    }();
    return *only;
  }
  static bool in_front() { return caching::get() == &instance(); }

  c10::DataPtr allocate(std::size_t n) override {
    const c10::Device here(c10::kCUDA, c10::cuda::current_device());
    if (n == 0) return base_->allocate(n);
    if (auto* const plan = detail::plan_on(c10::kCUDA))
      if (const auto place = plan->place(static_cast<bytes_t>(n)); place && *place != nullptr)
        return {*place, *place, &release_planned, here};
    auto* const record = detail::recording_on(c10::kCUDA);
    if (record == nullptr && detail::plan_on(c10::kCUDA) == nullptr) return base_->allocate(n);
    void* const data = base_->raw_alloc(n);
    if (record != nullptr) record->born(data, static_cast<bytes_t>(n));
    return {data, data, &release, here};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { base_->copy_data(to, from, n); }
  bool is_simple_data_ptr(const c10::DataPtr& p) const override { return base_->is_simple_data_ptr(p); }

  void* raw_alloc(std::size_t n) override {
    return raw(n, [&] { return base_->raw_alloc(n); });
  }
  void* raw_alloc_with_stream(std::size_t n, cudaStream_t stream) override {
    return raw(n, [&] { return base_->raw_alloc_with_stream(n, stream); });
  }
  void raw_delete(void* data) override { release(data); }

  // Everything else is PyTorch's.
  bool initialized() override { return base_->initialized(); }
  void emptyCache(pool_id pool) override { base_->emptyCache(pool); }
  void recordStream(const c10::DataPtr& p, c10::cuda::CUDAStream stream) override { base_->recordStream(p, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override { return base_->getDeviceStats(d); }
  void resetAccumulatedStats(DeviceIndex d) override { base_->resetAccumulatedStats(d); }
  void resetPeakStats(DeviceIndex d) override { base_->resetPeakStats(d); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex d) override { return base_->getMemoryInfo(d); }
  void init(int devices) override { base_->init(devices); }
  double getMemoryFraction(DeviceIndex d) override { return base_->getMemoryFraction(d); }
  void setMemoryFraction(double fraction, DeviceIndex d) override { base_->setMemoryFraction(fraction, d); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex d) override {
    return base_->getExpandableSegmentSizes(d);
  }
  void enable(bool on) override { base_->enable(on); }
  bool isEnabled() const override { return base_->isEnabled(); }
  void cacheInfo(DeviceIndex d, std::size_t* largest) override { base_->cacheInfo(d, largest); }
  void* getBaseAllocation(void* data, std::size_t* size) override { return base_->getBaseAllocation(data, size); }
  caching::SnapshotInfo snapshot(pool_id pool, bool traces) override { return base_->snapshot(pool, traces); }
  void beginAllocateToPool(DeviceIndex d, pool_id pool, std::function<bool(cudaStream_t)> filter) override {
    base_->beginAllocateToPool(d, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex d, pool_id pool) override { base_->endAllocateToPool(d, pool); }
  void markCaptureBegin(DeviceIndex d) override { base_->markCaptureBegin(d); }
  void markCaptureEnd(DeviceIndex d) override { base_->markCaptureEnd(d); }
  void releasePool(DeviceIndex d, pool_id pool) override { base_->releasePool(d, pool); }
  int getPoolUseCount(DeviceIndex d, pool_id pool) override { return base_->getPoolUseCount(d, pool); }
  void createOrIncrefPool(DeviceIndex d, pool_id pool, std::shared_ptr<CUDAAllocator> own) override {
    base_->createOrIncrefPool(d, pool, std::move(own));
  }
  void setUseOnOOM(DeviceIndex d, pool_id pool, bool use) override { base_->setUseOnOOM(d, pool, use); }
  void setNoSplit(DeviceIndex d, pool_id pool) override { base_->setNoSplit(d, pool); }
  bool checkPoolLiveAllocations(DeviceIndex d, pool_id pool, const std::unordered_set<void*>& live) override {
    return base_->checkPoolLiveAllocations(d, pool, live);
  }
  caching::ShareableHandle shareIpcHandle(void* data) override { return base_->shareIpcHandle(data); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return base_->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return base_->isHistoryEnabled(); }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return base_->getContextForPointer(data);
  }
  void recordHistory(bool on, caching::CreateContextFn make, std::size_t most, caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    base_->recordHistory(on, make, most, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& notes) override {
    base_->recordAnnotation(notes);
  }
  void pushCompileContext(std::string& context) override { base_->pushCompileContext(context); }
  void popCompileContext() override { base_->popCompileContext(); }
  bool supportsUserMetadata() override { return base_->supportsUserMetadata(); }
  void setUserMetadata(const std::string& text) override { base_->setUserMetadata(text); }
  std::string getUserMetadata() override { return base_->getUserMetadata(); }
  void annotateMemory(const void* data, const std::string& text) override { base_->annotateMemory(data, text); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver o) override { base_->attachOutOfMemoryObserver(std::move(o)); }
  void attachOomRejectionObserver(caching::OomRejectionObserver o) override { base_->attachOomRejectionObserver(std::move(o)); }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker t) override {
    base_->attachAllocatorTraceTracker(std::move(t));
  }
  void enablePeerAccess(DeviceIndex d, DeviceIndex other) override { base_->enablePeerAccess(d, other); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t n, cudaStream_t stream,
                          bool peers) override {
    return base_->memcpyAsync(to, to_device, from, from_device, n, stream, peers);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex d, pool_id pool) override {
    return base_->getCheckpointState(d, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex d, std::shared_ptr<caching::AllocatorState> state) override {
    return base_->setCheckpointPoolState(d, std::move(state));
  }
  c10::DataPtr allocateWithAddress(std::size_t n, void* address) override { return base_->allocateWithAddress(n, address); }
  std::string name() override { return base_->name(); }

 private:
  explicit cuda_allocator(caching::CUDAAllocator* base) : base_(base) {}

  template <class F>
  static void* raw(std::size_t n, const F& otherwise) {
    if (auto* const plan = detail::plan_on(c10::kCUDA); plan != nullptr && n > 0)
      if (const auto place = plan->place(static_cast<bytes_t>(n)); place && *place != nullptr) return *place;
    void* const data = otherwise();
    if (auto* const record = detail::recording_on(c10::kCUDA); record != nullptr && n > 0)
      record->born(data, static_cast<bytes_t>(n));
    return data;
  }
  static void release_planned(void* data) {
    if (auto* const plan = detail::plan_on(c10::kCUDA)) plan->died(data);
  }
  static void release(void* data) {
    if (data == nullptr) return;
    if (detail::in_arena(data)) return release_planned(data);
    release_planned(data);
    if (auto* const record = detail::recording_on(c10::kCUDA)) record->died(data);
    instance().base_->raw_delete(data);
  }

  caching::CUDAAllocator* base_;
};

class planned_on_cuda final : public planned_allocations {
 public:
  planned_on_cuda() : planned_allocations(c10::kCUDA) {}
  bool in_front() const override { return cuda_allocator::in_front(); }
};

/// The CUDA runtime that PyTorch uses.
const stream_calls& cuda_calls() {
  static const stream_calls calls = {
      .words =
          [](int status) {
            cudaGetLastError();
            return std::string(cudaGetErrorString(static_cast<cudaError_t>(status)));
          },
      .not_ready = cudaErrorNotReady,
      .allocate = [](void** data, std::size_t bytes) -> int { return cudaMalloc(data, bytes); },
      .release = [](void* data) -> int { return cudaFree(data); },
      .make_room = [] { caching::emptyCache(); },
      .allocated =
          [](c10::Device on) {
            const auto all = caching::getDeviceStats(on.index()).allocated_bytes[0];  // StatType::AGGREGATE
            return memory_use{all.current, all.peak};
          },
      .reset_peak = [](c10::Device on) { caching::resetPeakStats(on.index()); },
      .allocate_locked = [](void** data, std::size_t bytes) -> int { return cudaHostAlloc(data, bytes, cudaHostAllocDefault); },
      .release_locked = [](void* data) -> int { return cudaFreeHost(data); },
      .make_stream = [](void** stream) -> int {
        return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
      },
      .end_stream = [](void* stream) -> int { return cudaStreamDestroy(static_cast<cudaStream_t>(stream)); },
      .kernels = [](c10::Device on) -> void* { return c10::cuda::getCurrentCUDAStream(on.index()).stream(); },
      .make_event = [](void** event) -> int {
        return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
      },
      .end_event = [](void* event) -> int { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); },
      .record = [](void* event, void* stream) -> int {
        return cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream));
      },
      .reached = [](void* event) -> int {
        const auto status = cudaEventQuery(static_cast<cudaEvent_t>(event));
        if (status == cudaErrorNotReady) cudaGetLastError();  // which is no failure
        return status;
      },
      .wait = [](void* event) -> int { return cudaEventSynchronize(static_cast<cudaEvent_t>(event)); },
      .wait_in = [](void* stream, void* event) -> int {
        return cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0);
      },
      .copy = [](void* to, const void* from, std::size_t bytes, void* stream) -> int {
        return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream));
      }};
  return calls;
}

/// With its index.
c10::Device with_index(c10::Device which) {
  if (!which.is_cuda()) throw not_available("steps run on the host or on a CUDA device, not on " + which.str());
  int count = 0;
  cuda::detail::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  const auto index = which.has_index() ? which.index() : c10::cuda::current_device();
  if (index >= count) throw not_available("there is no device cuda:" + std::to_string(index));
  return {c10::kCUDA, index};
}

}  // namespace

device& cuda_device(c10::Device which) {
  const auto on = with_index(which);
  static std::mutex mutex;
  static auto* const made = new std::map<DeviceIndex, std::unique_ptr<device>>;  // its memory may outlive static objects
  std::lock_guard lock(mutex);
  auto& d = (*made)[on.index()];
  if (!d) {
    at::globalContext().lazyInitDevice(c10::kCUDA);  // before the allocator is wrapped
    cuda_allocator::instance();
    cudaDeviceProp properties;
    cuda::detail::check(cudaGetDeviceProperties(&properties, on.index()), "cudaGetDeviceProperties");
    d = make_streaming_device(on, on.str() + " (" + properties.name + ")", cuda_calls(),
                              [] { return std::make_unique<planned_on_cuda>(); });
  }
  return *d;
}

far_memory cuda_far_memory(c10::Device which, bytes_t limit) { return locked_memory(cuda_device(which), limit); }

}  // namespace remat::pytorch
