// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CUDA runtime on the emulated hardware: errors, devices and memory. It is preloaded, before PyTorch's `libcudart` is bound.
#include "cuda_runtime.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace emulated::cuda {
namespace {

thread_local int device = 0;
thread_local cudaError_t last = cudaSuccess;

/// The text of the real runtime, which is loaded after this one.
const char* text_of(const char* function, cudaError_t error) {
  using asks = const char* (*)(cudaError_t);
  if (const auto real = reinterpret_cast<asks>(dlsym(RTLD_NEXT, function))) return real(error);
  thread_local std::string text;
  text = "error " + std::to_string(error) + " of CUDA";
  return text.c_str();
}

cudaError_t code_of(capture_error::why why) {
  using reason = capture_error::why;
  switch (why) {
    case reason::forbidden:
      return cudaErrorStreamCaptureUnsupported;
    case reason::invalid:
      return cudaErrorStreamCaptureInvalidated;
    case reason::unjoined:
      return cudaErrorStreamCaptureUnjoined;
    case reason::other_capture:
      return cudaErrorStreamCaptureMerge;
    case reason::outside:
      return cudaErrorStreamCaptureIsolation;
    case reason::default_stream:
      return cudaErrorStreamCaptureImplicit;
    case reason::captured_event:
      return cudaErrorCapturedEvent;
  }
  return cudaErrorUnknown;
}

bool exists(int d) { return 0 <= d && d < device_count; }

/// The memory taken by others and the allocated memory may exceed the total.
std::size_t free_bytes(int d) {
  const auto used = used_bytes(d), total = total_bytes(d);
  return used < total ? total - used : 0;
}

bool in_this_process(const void* p) { return device_of(p) >= 0 || is_pinned(p); }

}  // namespace

int current_device() { return device; }

stream& of(cudaStream_t s) {
  if (s == nullptr || s == cudaStreamLegacy || s == cudaStreamPerThread) return default_stream(device);
  return *reinterpret_cast<stream*>(s);
}

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last = error;
  return error;
}

cudaError_t translate() {
  if (option::get("lost") != 0) return cudaErrorDevicesUnavailable;
  try {
    throw;
  } catch (const out_of_memory&) {
    return cudaErrorMemoryAllocation;
  } catch (const capture_error& e) {
    return code_of(e.reason);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return cudaErrorLaunchFailure;
  }
}

}  // namespace emulated::cuda

using namespace emulated;
using namespace emulated::cuda;

extern "C" {

int emulated_refuse(const char* function) {
  static auto* const lock = new std::mutex;
  static auto* const reported = new std::set<std::string>;
  const std::lock_guard guard(*lock);
  if (reported->insert(function).second) std::fprintf(stderr, "emulated CUDA: %s is not supported\n", function);
  return note(cudaErrorNotSupported);
}

// --- errors ------------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t error) { return text_of("cudaGetErrorName", error); }
const char* cudaGetErrorString(cudaError_t error) { return text_of("cudaGetErrorString", error); }

// --- devices -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int d) {
  if (!exists(d)) return note(cudaErrorInvalidDevice);
  device = d;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  if (!exists(d)) return note(cudaErrorInvalidDevice);
  *p = {};
  std::snprintf(p->name, sizeof p->name, "emulated device %d", d);
  p->major = 9;
  p->totalGlobalMem = total_bytes(d);
  p->multiProcessorCount = 4;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 1 << 20;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->pciBusID = d + 1;
  p->asyncEngineCount = 2;
  p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = p->streamPrioritiesSupported = 1;
  p->uuid.bytes[0] = static_cast<char>(d + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int d) {
  cudaDeviceProp p;
  if (const auto error = cudaGetDeviceProperties(&p, d)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = p.asyncEngineCount;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = p.unifiedAddressing;
      break;
    default:
      return static_cast<cudaError_t>(emulated_refuse(("cudaDeviceGetAttribute(" + std::to_string(attribute) + ")").c_str()));
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int d) {
  if (!exists(d)) return note(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:%02x:00.0", static_cast<unsigned>(d + 1));
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return note(cudaErrorPeerAccessUnsupported); }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceSynchronize() {
  return attempt([] { synchronize_device(device); });
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }  // there is no profiler to start
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- memory ------------------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  return attempt([&] {
    refuse_in_captures("cudaMalloc");
    *p = allocate(device, bytes);
  });
}

cudaError_t cudaFree(void* p) {
  if (p == nullptr) return cudaSuccess;
  if (device_of(p) < 0) return note(cudaErrorInvalidValue);
  return attempt([&] {
    refuse_in_captures("cudaFree");
    release(p);
    if (option::get("lost") != 0) throw failure("emulated: the device is lost");
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  if (option::get("lost") != 0) return note(cudaErrorDevicesUnavailable);
  *free = free_bytes(device);
  *total = total_bytes(device);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  *p = nullptr;
  if (bytes == 0) return cudaSuccess;
  return attempt([&] {
    refuse_in_captures("cudaHostAlloc");
    *p = allocate_pinned(bytes);
  });
}

cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }

cudaError_t cudaFreeHost(void* p) {
  if (p == nullptr) return cudaSuccess;
  if (!is_pinned(p)) return note(cudaErrorInvalidValue);
  return attempt([&] {
    refuse_in_captures("cudaFreeHost");
    release_pinned(p);
  });
}

cudaError_t cudaHostRegister(void* p, size_t bytes, unsigned) {
  if (p == nullptr || bytes == 0) return note(cudaErrorInvalidValue);
  if (is_pinned(p)) return note(cudaErrorHostMemoryAlreadyRegistered);
  return attempt([&] { register_pinned(p, bytes); });
}

cudaError_t cudaHostUnregister(void* p) {
  if (!is_pinned(p)) return note(cudaErrorHostMemoryNotRegistered);
  return attempt([&] { unregister_pinned(p); });
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* p, unsigned) {
  if (!is_pinned(p)) return note(cudaErrorInvalidValue);
  *on_device = p;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  *a = {};
  a->device = device_of(p);
  a->type = a->device >= 0 ? cudaMemoryTypeDevice : is_pinned(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  if (in_this_process(p)) a->devicePointer = const_cast<void*>(p);
  if (a->device < 0) a->hostPointer = const_cast<void*>(p);
  if (a->type == cudaMemoryTypeHost) a->device = device;
  return cudaSuccess;
}

// --- copies ------------------------------------------------------------------------------------------------------------------

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
  const bool wrong = (kind == cudaMemcpyHostToDevice && device_of(from) >= 0) ||
                     (kind == cudaMemcpyDeviceToHost && device_of(to) >= 0) ||
                     (kind == cudaMemcpyDeviceToDevice && (device_of(from) < 0 || device_of(to) < 0));
  if (wrong) return note(cudaErrorInvalidMemcpyDirection);
  return attempt([&] { copy(to, from, bytes, of(s)); });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const auto error = attempt([] { refuse_in_captures("cudaMemcpy"); })) return error;
  if (const auto error = cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return error;
  return attempt([] { synchronize(default_stream(device)); });
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t s) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, s);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t s) {
  return attempt([&] { fill(to, value, bytes, of(s)); });
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

}  // extern "C"
