// SPDX-License-Identifier: Apache-2.0
/// @file
/// Keys of everything that a capture, or one of its calls, depends on. Private to the adapter.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace remat::pytorch {

/// A string of bytes that differs if any value in it differs.
class key {
 public:
  template <class T>
  key& operator<<(const T& x) requires std::is_trivially_copyable_v<T> {
    bytes_.append(reinterpret_cast<const char*>(&x), sizeof x);
    return *this;
  }
  key& operator<<(const std::string& x) {
    *this << x.size();
    bytes_ += x;
    return *this;
  }
  key& operator<<(at::IntArrayRef list) {
    *this << list.size();
    bytes_.append(reinterpret_cast<const char*>(list.data()), list.size() * sizeof list[0]);
    return *this;
  }
  key& operator<<(const at::Tensor& t) {
    *this << t.scalar_type() << t.requires_grad() << t.device() << t.layout() << t.sizes();
    return t.layout() == at::kStrided ? *this << t.strides() : *this;
  }
  const std::string& bytes() const { return bytes_; }
  void clear() { bytes_.clear(); }

 private:
  std::string bytes_;
};

/// The kinds of devices that steps of this process may run on: the host, and the accelerator if there is one.
inline std::vector<c10::DeviceType> devices_of_steps() {
  std::vector<c10::DeviceType> kinds = {c10::kCPU};
  if (const auto accelerator = at::accelerator::getAccelerator()) kinds.push_back(*accelerator);
  return kinds;
}

/// The type of autocast of this thread for a kind of device; nothing if it is off.
inline std::optional<at::ScalarType> autocast_on(c10::DeviceType kind) {
  if (!at::autocast::is_autocast_enabled(kind)) return {};
  return at::autocast::get_autocast_dtype(kind);
}

inline bool under_autocast() {
  const auto kinds = devices_of_steps();
  return std::any_of(kinds.begin(), kinds.end(), [](auto kind) { return at::autocast::is_autocast_enabled(kind); });
}

/// The autocast state of this thread.
class autocast_state {
 public:
  static autocast_state now() {
    autocast_state s;
    for (const auto device : devices_of_steps())
      s.modes_.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
    s.cache_ = at::autocast::is_autocast_cache_enabled();
    return s;
  }
  void restore() const {
    for (const auto& m : modes_) {
      at::autocast::set_autocast_enabled(m.device, m.enabled);
      at::autocast::set_autocast_dtype(m.device, m.type);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  struct mode {
    at::DeviceType device;
    bool enabled;
    at::ScalarType type;
  };
  std::vector<mode> modes_;
  bool cache_ = true;
};

/// Adds settings of PyTorch that choose kernels below autograd, and how kernels use memory.
inline void add_kernel_settings(key& k) {
  auto& c = at::globalContext();
  k << at::get_num_threads() << c.deterministicAlgorithms() << c.deterministicFillUninitializedMemory() << c.userEnabledMkldnn()
    << c.userEnabledFlashSDP() << c.userEnabledMemEfficientSDP() << c.userEnabledMathSDP()
    << c10::typeMetaToScalarType(c10::get_default_dtype());
  // `allow_tf32` and `set_float32_matmul_precision` set these, too. Their getters raise an error once a program sets these.
  for (const auto backend : {at::Float32Backend::CUDA, at::Float32Backend::MKLDNN})
    for (const auto op : {at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL}) k << c.float32Precision(backend, op);
  const auto kinds = devices_of_steps();
  if (kinds.back() == c10::kCUDA)
    k << c.userEnabledCuDNN() << c.deterministicCuDNN() << c.benchmarkCuDNN() << c.benchmarkLimitCuDNN()
      << c.allowFP16ReductionCuBLAS() << c.allowBF16ReductionCuBLAS() << c.allowFP16AccumulationCuBLAS()
      << c.userEnabledCuDNNSDP() << c.allowFP16BF16ReductionMathSDP() << c.userEnabledFA3SDP() << c.userEnabledFA4SDP()
      << c.sDPPriorityOrder() << c.blasPreferredBackend() << c.linalgPreferredBackend() << c.cudnnDepthwiseKernel();
}

/// Adds the kernel settings, and autocast.
inline void add_settings(key& k) {
  add_kernel_settings(k);
  for (const auto device : devices_of_steps()) k << autocast_on(device).value_or(at::ScalarType::Undefined);
}

}  // namespace remat::pytorch
