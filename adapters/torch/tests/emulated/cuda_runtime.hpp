// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the parts of the emulated CUDA runtime share, and what the kernels of the emulation need of it.
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
/// Turns the exception that is handled into an error.
cudaError_t translate();
/// Calls what the hardware does and turns what it throws into an error.
template <class F>
cudaError_t attempt(F&& call) {
  try {
    call();
    return cudaSuccess;
  } catch (...) {
    return note(translate());
  }
}

/// Fails if a capture is going on that does not allow the calling thread the call. See `cudaStreamCaptureMode`.
/// @throws capture_error
void refuse_in_captures(const char* call);

}  // namespace emulated::cuda

extern "C" {
/// Says once that a function does not exist in the emulation. @returns cudaErrorNotSupported, which is kept as the last error
int emulated_refuse(const char* function);
}
