// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where the tests tagged [device] run: on the host, or on the device that REMAT_TEST_DEVICE names.
///
///     emulated   an accelerator of our own; REMAT_EMULATED is the folder of libemulated_accelerator.so
///     cuda       CUDA: emulated if libemulated_cuda.so is preloaded, else a real device
///
/// Tests tagged [accelerator] need an accelerator. Where a real device is asked for and missing, the program says so and is
/// skipped.
#pragma once

#include <dlfcn.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <remat/core/error.hpp>
#include <remat/pytorch/device.hpp>
#include <string>

c10::Device test_device();

namespace hardware {

/// A function of the emulated hardware; null if the tests run on other hardware.
template <class F>
F* function(const char* name) {
  test_device();  // loads the hardware
  return reinterpret_cast<F*>(dlsym(RTLD_DEFAULT, name));
}
/// Whether the tests run on an emulated device.
inline bool emulated() { return function<void()>("emulated_reset") != nullptr; }
/// Sets an option of the emulated hardware; emulated/hardware.hpp lists the options.
inline void set(const char* option, long value) {
  if (auto* const f = function<void(const char*, long)>("emulated_set")) f(option, value);
}
inline long get(const char* option) {
  auto* const f = function<long(const char*)>("emulated_get");
  return f == nullptr ? 0 : f(option);
}
/// The first races found: pairs of jobs that used the same bytes without an ensured order, one pair per line.
inline std::string races() {
  std::string all;
  if (auto* const f = function<const char*(int)>("emulated_race"))
    for (int k = 0; const char* text = f(k); ++k) all += std::string(text) + "\n";
  return all;
}
/// Simulates that another process takes memory of a device.
inline void take(int device, long bytes) {
  if (auto* const f = function<void(int, long)>("emulated_take")) f(device, bytes);
}
/// Sets the counts to zero, and makes failed streams work again.
inline void reset() {
  if (auto* const f = function<void()>("emulated_reset")) f();
}
/// Sets an option while it lives.
struct option {
  option(const char* n, long value) : name(n), before(get(n)) { set(name, value); }
  ~option() {
    set(name, before);
    reset();
  }
  option(const option&) = delete;
  option& operator=(const option&) = delete;
  const char* name;
  long before;
};

/// Loads the libraries of a device. @return its name in PyTorch
inline std::string load(const std::string& name) {
  const auto library = [&](const std::string& file) {
    const char* const folder = std::getenv("REMAT_EMULATED");
    if (dlopen(((folder != nullptr ? folder : ".") + ("/" + file)).c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return;
    std::printf("%s\n", dlerror());
    std::_Exit(1);
  };
  if (name == "emulated") {
    library("libemulated_accelerator.so");
    return "privateuseone:0";
  }
  const char* const preloaded = std::getenv("LD_PRELOAD");
  if (name == "cuda" && preloaded != nullptr && std::string(preloaded).find("libemulated_cuda.so") != std::string::npos) {
    library("libemulated_cuda_kernels.so");
    at::globalContext().setUserEnabledCuDNN(false);  // cuDNN and the attention kernels launch kernels of their own
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
  }
  return name;
}

}  // namespace hardware

inline c10::Device test_device() {
  static const c10::Device device = [] {
    const char* name = std::getenv("REMAT_TEST_DEVICE");
    if (name == nullptr || std::string(name) == "cpu") return c10::Device(c10::kCPU);
    try {
      const auto which = remat::pytorch::device_of(c10::Device(hardware::load(name))).which();
      at::globalContext().setDeterministicAlgorithms(true, true);
      at::globalContext().setDeterministicCuDNN(true);
      return which;
    } catch (const remat::not_available& e) {
      std::printf("skipped: %s\n", e.what());
      std::fflush(stdout);
      std::_Exit(77);  // Meson's status for skipped tests
    }
  }();
  return device;
}

/// The state of the default generator of the tested device.
inline at::Tensor state_of_test_generator() { return at::globalContext().defaultGenerator(test_device()).get_state(); }
