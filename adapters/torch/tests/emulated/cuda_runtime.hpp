// SPDX-License-Identifier: Apache-2.0
/// @file
/// Declarations shared by the parts of the emulated CUDA runtime and by the emulated kernels.
///
/// A `cudaStream_t` is the address of an `emulated::stream`. Null is the default stream of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>

#include "hardware.hpp"

namespace emulated::cuda {

/// The stream behind a `cudaStream_t`.
stream& of(cudaStream_t s);
int current_device();

/// Keeps an error for `cudaGetLastError`, and returns it.
cudaError_t note(cudaError_t error);
/// Translates the exception being handled into an error.
cudaError_t translate();
/// Calls the hardware, and translates its exceptions into errors.
template <class F>
cudaError_t attempt(F&& call) {
  try {
    call();
    return cudaSuccess;
  } catch (...) {
    return note(translate());
  }
}

/// Fails if a capture in progress forbids the call on the calling thread. See `cudaStreamCaptureMode`.
/// @throws capture_error
void refuse_in_captures(const char* call);

}  // namespace emulated::cuda

extern "C" {
/// Prints once that a function does not exist in the emulation. @returns cudaErrorNotSupported, which becomes the last error
int emulated_refuse(const char* function);
}
