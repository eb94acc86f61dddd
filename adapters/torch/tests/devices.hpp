// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where the tests tagged [device] run: on the host, or with REMAT_TEST_DEVICE=cuda on a CUDA device, and are skipped without
/// one.
#pragma once

#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <remat/core/error.hpp>
#include <remat/pytorch/device.hpp>
#include <string>

inline c10::Device test_device() {
  static const c10::Device device = [] {
    const char* name = std::getenv("REMAT_TEST_DEVICE");
    if (name == nullptr || std::string(name) == "cpu") return c10::Device(c10::kCPU);
    try {
      const auto which = remat::pytorch::device_of(c10::Device(name)).which();
      at::globalContext().setDeterministicAlgorithms(true, true);
      at::globalContext().setDeterministicCuDNN(true);
      return which;
    } catch (const remat::not_available& e) {
      std::printf("skipped: %s\n", e.what());
      std::fflush(stdout);
      std::_Exit(77);  // what meson takes for skipped
    }
  }();
  return device;
}

/// The state of the default generator there.
inline at::Tensor state_of_test_generator() { return at::globalContext().defaultGenerator(test_device()).get_state(); }
