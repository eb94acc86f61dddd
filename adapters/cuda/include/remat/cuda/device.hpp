// SPDX-License-Identifier: Apache-2.0
/// @file
/// Facts about a CUDA device that planning needs: the size of its memory, and the rates of copies to and from the host.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat::cuda {

namespace detail {

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const auto text = std::string(call) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice)
    throw not_available("no CUDA device can be used; " + text);
  throw error(text);
}

struct free_device {
  void operator()(void* p) const { cudaFree(p); }
};
struct free_host {
  void operator()(void* p) const { cudaFreeHost(p); }
};
struct destroy_event {
  void operator()(cudaEvent_t e) const { cudaEventDestroy(e); }
};
struct destroy_stream {
  void operator()(cudaStream_t s) const { cudaStreamDestroy(s); }
};
using event = std::unique_ptr<CUevent_st, destroy_event>;
using stream = std::unique_ptr<CUstream_st, destroy_stream>;

inline event make_event() {
  cudaEvent_t e = nullptr;
  check(cudaEventCreate(&e), "cudaEventCreate");
  return event(e);
}

}  // namespace detail

/// A CUDA device, with its free memory at the time of the call.
struct device {
  int index = 0;
  std::string name;
  bytes_t total = 0;  ///< size of its memory, bytes
  bytes_t free = 0;   ///< memory that no process uses, bytes
};

/// Lists the usable devices.
/// @throws not_available without a driver or a device, with the message of the CUDA runtime; error if a call of CUDA fails
inline std::vector<device> devices() {
  int count = 0;
  detail::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  std::vector<device> all;
  int before = 0;
  detail::check(cudaGetDevice(&before), "cudaGetDevice");
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    std::size_t free = 0, total = 0;
    detail::check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    detail::check(cudaSetDevice(i), "cudaSetDevice");
    detail::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    all.push_back({i, properties.name, static_cast<bytes_t>(total), static_cast<bytes_t>(free)});
  }
  detail::check(cudaSetDevice(before), "cudaSetDevice");
  return all;
}

/// Options of `measure_copies`.
struct copy_options {
  bytes_t bytes = bytes_t{64} << 20;  ///< size of a large copy, >= 1; also taken on the device and, pinned, on the host
  int repetitions = 5;                ///< number of runs, >= 1; the fastest counts
};

/// Measures the rates of copies between the current device and pinned memory of the host, for `problem::copies`.
/// @return bytes / s in each direction, and the latency of a small copy, s
/// @throws bad_option for options out of range; not_available without a device; error if a call of CUDA fails
inline copy_rates measure_copies(const copy_options& o = {}) {
  if (o.bytes < 1) throw bad_option("copy_options.bytes must be >= 1, got " + std::to_string(o.bytes));
  if (o.repetitions < 1) throw bad_option("copy_options.repetitions must be >= 1, got " + std::to_string(o.repetitions));
  const auto bytes = static_cast<std::size_t>(o.bytes);
  void* p = nullptr;
  detail::check(cudaMalloc(&p, bytes), "cudaMalloc");
  const std::unique_ptr<void, detail::free_device> on_device(p);
  detail::check(cudaMallocHost(&p, bytes), "cudaMallocHost");
  const std::unique_ptr<void, detail::free_host> on_host(p);
  cudaStream_t s = nullptr;
  detail::check(cudaStreamCreate(&s), "cudaStreamCreate");
  const detail::stream copies(s);
  const auto begin = detail::make_event(), end = detail::make_event();

  const auto seconds = [&](std::size_t size, cudaMemcpyKind kind) {
    float best = 0;
    for (int i = 0; i <= o.repetitions; ++i) {  // the first run warms up
      const bool up = kind == cudaMemcpyHostToDevice;
      detail::check(cudaEventRecord(begin.get(), s), "cudaEventRecord");
      detail::check(cudaMemcpyAsync(up ? on_device.get() : on_host.get(), up ? on_host.get() : on_device.get(), size, kind, s),
                    "cudaMemcpyAsync");
      detail::check(cudaEventRecord(end.get(), s), "cudaEventRecord");
      detail::check(cudaEventSynchronize(end.get()), "cudaEventSynchronize");
      float milliseconds = 0;
      detail::check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "cudaEventElapsedTime");
      if (i > 0) best = i == 1 ? milliseconds : std::min(best, milliseconds);
    }
    return static_cast<double>(best) * 1e-3;
  };
  const double latency = std::min(seconds(1, cudaMemcpyDeviceToHost), seconds(1, cudaMemcpyHostToDevice));
  const auto rate = [&](cudaMemcpyKind kind) {
    return static_cast<double>(bytes) / std::max(seconds(bytes, kind) - latency, 1e-9);
  };
  return {.to_host = rate(cudaMemcpyDeviceToHost), .to_device = rate(cudaMemcpyHostToDevice), .latency = latency};
}

}  // namespace remat::cuda
