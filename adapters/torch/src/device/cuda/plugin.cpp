// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CUDA backend: the only code of remat that includes headers of CUDA. It is a separate library, built against the headers
/// inside the torch wheel, and loaded when a CUDA device is requested. It needs no CUDA Toolkit, and loads without a driver.
#include <ATen/core/GraphImplInterface.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <fstream>

#include "../backend.hpp"

namespace remat::pytorch {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using pool_id = c10::MempoolId_t;

/// PyTorch's CUDA code asks `CUDACachingAllocator::get()`, so the front derives from its class.
class cuda_front final : public caching::CUDAAllocator {
 public:
  cuda_front(caching::CUDAAllocator* own, const front_calls& calls) : own_(own), front_(*own, calls) {}
  static cuda_front* instance;  ///< never destroyed: tensors die after static objects

  caching::CUDAAllocator& own() const { return *own_; }

  c10::DataPtr allocate(std::size_t n) override { return front_.allocate(current(), n, &release); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { own_->copy_data(to, from, n); }
  bool is_simple_data_ptr(const c10::DataPtr& p) const override { return own_->is_simple_data_ptr(p); }

  void* raw_alloc(std::size_t n) override {
    return raw(current(), n, [&] { return own_->raw_alloc(n); });
  }
  void* raw_alloc_with_stream(std::size_t n, cudaStream_t stream) override {
    const auto on = c10::cuda::getStreamFromExternal(stream, c10::cuda::current_device());
    const auto now = c10::cuda::getCurrentCUDAStream();
    return raw(stream == now.stream() ? now.unwrap() : on.unwrap(), n, [&] { return own_->raw_alloc_with_stream(n, stream); });
  }
  void raw_delete(void* data) override { release(data); }

  // Everything else is PyTorch's.
  bool initialized() override { return own_->initialized(); }
  void emptyCache(pool_id pool) override { own_->emptyCache(pool); }
  void recordStream(const c10::DataPtr& p, c10::cuda::CUDAStream stream) override {
    front_.record_stream(p, stream.unwrap(), &release);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override { return own_->getDeviceStats(d); }
  void resetAccumulatedStats(DeviceIndex d) override { own_->resetAccumulatedStats(d); }
  void resetPeakStats(DeviceIndex d) override { own_->resetPeakStats(d); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex d) override { return own_->getMemoryInfo(d); }
  void init(int devices) override { own_->init(devices); }
  double getMemoryFraction(DeviceIndex d) override { return own_->getMemoryFraction(d); }
  void setMemoryFraction(double fraction, DeviceIndex d) override { own_->setMemoryFraction(fraction, d); }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex d) override {
    return own_->getExpandableSegmentSizes(d);
  }
  void enable(bool on) override { own_->enable(on); }
  bool isEnabled() const override { return own_->isEnabled(); }
  void cacheInfo(DeviceIndex d, std::size_t* largest) override { own_->cacheInfo(d, largest); }
  void* getBaseAllocation(void* data, std::size_t* size) override { return own_->getBaseAllocation(data, size); }
  caching::SnapshotInfo snapshot(pool_id pool, bool traces) override { return own_->snapshot(pool, traces); }
  void beginAllocateToPool(DeviceIndex d, pool_id pool, std::function<bool(cudaStream_t)> filter) override {
    own_->beginAllocateToPool(d, pool, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex d, pool_id pool) override { own_->endAllocateToPool(d, pool); }
  void markCaptureBegin(DeviceIndex d) override { own_->markCaptureBegin(d); }
  void markCaptureEnd(DeviceIndex d) override { own_->markCaptureEnd(d); }
  void releasePool(DeviceIndex d, pool_id pool) override { own_->releasePool(d, pool); }
  int getPoolUseCount(DeviceIndex d, pool_id pool) override { return own_->getPoolUseCount(d, pool); }
  void createOrIncrefPool(DeviceIndex d, pool_id pool, std::shared_ptr<CUDAAllocator> own) override {
    own_->createOrIncrefPool(d, pool, std::move(own));
  }
  void setUseOnOOM(DeviceIndex d, pool_id pool, bool use) override { own_->setUseOnOOM(d, pool, use); }
  void setNoSplit(DeviceIndex d, pool_id pool) override { own_->setNoSplit(d, pool); }
  bool checkPoolLiveAllocations(DeviceIndex d, pool_id pool, const std::unordered_set<void*>& live) override {
    return own_->checkPoolLiveAllocations(d, pool, live);
  }
  caching::ShareableHandle shareIpcHandle(void* data) override { return own_->shareIpcHandle(data); }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override { return own_->getIpcDevPtr(std::move(handle)); }
  bool isHistoryEnabled() override { return own_->isHistoryEnabled(); }
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return own_->getContextForPointer(data);
  }
  void recordHistory(bool on, caching::CreateContextFn make, std::size_t most, caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skip) override {
    own_->recordHistory(on, make, most, when, clear, skip);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& notes) override { own_->recordAnnotation(notes); }
  void pushCompileContext(std::string& context) override { own_->pushCompileContext(context); }
  void popCompileContext() override { own_->popCompileContext(); }
  bool supportsUserMetadata() override { return own_->supportsUserMetadata(); }
  void setUserMetadata(const std::string& text) override { own_->setUserMetadata(text); }
  std::string getUserMetadata() override { return own_->getUserMetadata(); }
  void annotateMemory(const void* data, const std::string& text) override { own_->annotateMemory(data, text); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver o) override { own_->attachOutOfMemoryObserver(std::move(o)); }
  void attachOomRejectionObserver(caching::OomRejectionObserver o) override { own_->attachOomRejectionObserver(std::move(o)); }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker t) override { own_->attachAllocatorTraceTracker(std::move(t)); }
  void enablePeerAccess(DeviceIndex d, DeviceIndex other) override { own_->enablePeerAccess(d, other); }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device, std::size_t n, cudaStream_t stream,
                          bool peers) override {
    return own_->memcpyAsync(to, to_device, from, from_device, n, stream, peers);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(DeviceIndex d, pool_id pool) override {
    return own_->getCheckpointState(d, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(DeviceIndex d, std::shared_ptr<caching::AllocatorState> state) override {
    return own_->setCheckpointPoolState(d, std::move(state));
  }
  c10::DataPtr allocateWithAddress(std::size_t n, void* address) override { return own_->allocateWithAddress(n, address); }
  std::string name() override { return own_->name(); }

 private:
  static c10::Stream current() { return c10::cuda::getCurrentCUDAStream().unwrap(); }
  static void release(void* data) { instance->front_.release(c10::kCUDA, data); }

  template <class F>
  void* raw(c10::Stream on, std::size_t n, const F& otherwise) {
    if (n == 0) return otherwise();
    if (void* const place = front_.calls().place(on, n)) return place;
    void* const data = front_.with_room(on.device(), otherwise);
    front_.calls().born(on.device(), data, n);
    return data;
  }

  caching::CUDAAllocator* own_;
  front front_;
};
cuda_front* cuda_front::instance = nullptr;

/// Implements `at::accelerator::Graph` for CUDA, where PyTorch 2.15 has no implementation.
class cuda_graph final : public at::GraphImplInterface {
 public:
  explicit cuda_graph(const at::GraphImplArgs& a) : graph_(a.keep_graph) {}
  static void add_to_registry() {
    if (at::has_graph_impl(c10::kCUDA)) return;
    at::GraphImplRegistry()->Register(c10::DeviceTypeName(c10::kCUDA, false), [](const at::GraphImplArgs& a) {
      return std::unique_ptr<at::GraphImplInterface>(new cuda_graph(a));
    });
  }

  void capture_begin(pool_id pool, at::GraphCaptureMode mode) override { graph_.capture_begin(pool, of_cuda(mode)); }
  void capture_end() override { graph_.capture_end(); }
  void instantiate() override { graph_.instantiate(); }
  void replay() override { graph_.replay(); }
  void reset() override { graph_.reset(); }
  pool_id pool() const override { return const_cast<at::cuda::CUDAGraph&>(graph_).pool(); }
  void enable_debug_mode() override { graph_.enable_debug_mode(); }
  void debug_dump(const std::string&) override { TORCH_CHECK(false, "remat: PyTorch's CUDAGraph writes no dump"); }

 private:
  static cudaStreamCaptureMode of_cuda(at::GraphCaptureMode mode) {
    if (mode == at::GraphCaptureMode::ThreadLocal) return cudaStreamCaptureModeThreadLocal;
    return mode == at::GraphCaptureMode::Relaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
  }
  at::cuda::CUDAGraph graph_;
};

/// The first line of an error message of PyTorch.
std::string first_line(const c10::Error& e) {
  const std::string text = e.what_without_backtrace();
  return text.substr(0, text.find('\n'));
}

/// While it exists, new pages of the calling thread come from the memory node next to a device (NUMA).
class near_device {
 public:
  explicit near_device(DeviceIndex device) {
    std::array<char, 32> bus{};
    if (cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device) != cudaSuccess) {
      cudaGetLastError();
      return;
    }
    std::string id(bus.data());
    for (auto& c : id) c = static_cast<char>(std::tolower(c));
    std::ifstream file("/sys/bus/pci/devices/" + id + "/numa_node");
    int node = -1;
    if (!(file >> node) || node < 0 || node >= 64) return;
    if (syscall(SYS_get_mempolicy, &policy_, nodes_.data(), bits, nullptr, 0UL) != 0) return;
    const unsigned long mask = 1UL << node;
    set_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, &mask, 64UL) == 0;
  }
  ~near_device() {
    if (set_) syscall(SYS_set_mempolicy, policy_, nodes_.data(), bits);
  }
  near_device(const near_device&) = delete;
  near_device& operator=(const near_device&) = delete;

 private:
  static constexpr unsigned long bits = 1024;  // largest number of memory nodes of a kernel
  int policy_ = MPOL_DEFAULT;                  ///< of the thread, before
  std::array<unsigned long, bits / (8 * sizeof(unsigned long))> nodes_{};
  bool set_ = false;
};

class cuda_backend final : public backend {
 public:
  void install(const front_calls& calls) override {
    if (cuda_front::instance != nullptr) return;
    cuda_front::instance = new cuda_front(caching::get(), calls);
    caching::allocator = cuda_front::instance;
    constexpr std::uint8_t priority = 10;
    c10::SetAllocator(c10::kCUDA, cuda_front::instance, priority);
    cuda_graph::add_to_registry();
  }
  bool in_front() const override { return caching::get() == cuda_front::instance; }
  c10::DeviceAllocator& own() const override { return cuda_front::instance->own(); }
  std::string problem() const override {
    try {
      c10::cuda::device_count_ensure_non_zero();
      return "";
    } catch (const c10::Error& e) {
      return first_line(e);
    }
  }
  std::string name(c10::Device on) const override {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, on.index()) != cudaSuccess) {
      cudaGetLastError();
      return on.str();
    }
    return on.str() + " (" + properties.name + ")";
  }
  double fraction(c10::Device on) const override { return cuda_front::instance->own().getMemoryFraction(on.index()); }
  /// Asks CUDA directly, because PyTorch's pinned allocator rounds sizes up to powers of two.
  c10::DataPtr pinned(c10::Device on, std::size_t bytes) const override {
    const near_device pages(on.index());
    void* data = nullptr;
    C10_CUDA_CHECK(cudaHostAlloc(&data, bytes, cudaHostAllocDefault));
    return {data, data, [](void* p) { C10_CUDA_CHECK_WARN(cudaFreeHost(p)); }, c10::Device(c10::kCPU)};
  }
};

}  // namespace
}  // namespace remat::pytorch

extern "C" __attribute__((visibility("default"))) remat::pytorch::backend* remat_backend(int interface) {
  return interface == remat::pytorch::backend_interface ? new remat::pytorch::cuda_backend : nullptr;
}
