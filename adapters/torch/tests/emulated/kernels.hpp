// SPDX-License-Identifier: Apache-2.0
/// @file
/// Kernels of the emulated devices: those of the host, on the bytes of the device. Both emulations use them, with a `backend`
/// each.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "hardware.hpp"

namespace emulated {

/// From where one call draws its random numbers.
struct philox {
  std::uint64_t seed = 0, offset = 0;
};
/// Outputs that a call which draws takes from the generator of the device.
constexpr std::uint64_t draws_per_call = 4;

/// What the kernels must know of the device, as PyTorch sees it. One object per process, never destroyed.
class backend {
 public:
  virtual ~backend() = default;
  virtual c10::DeviceType type() const = 0;
  virtual c10::DispatchKey key() const = 0;
  /// Of the calling thread.
  virtual stream& current_stream(c10::DeviceIndex device) const = 0;
  /// Advances the generator by `draws_per_call`, and tells from where the call draws. `given` may be undefined: the default
  /// generator of `device`. The function is called when the kernel runs; at each replay if it has been captured, so it must
  /// give the state of then. It is not called during a capture.
  virtual std::function<philox()> draw(const at::Generator& given, c10::DeviceIndex device) const = 0;
};

/// Runs the operator on tensors of the device, by its kernel for the host. What the kernel allocates comes from the allocator
/// of the device. Arguments are taken from the stack, and results are put there.
/// @throws capture_error if the operator looks at data and the stream is captured
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, const backend& on);

/// The same for an operator known by its name, such as "aten::convolution".
void run(const char* name, const char* overload, torch::jit::Stack* stack, const backend& on);

/// `to.copy_(from, later)` if one of them or both are on the device. Waits for the host where CUDA does.
void copy(const at::Tensor& to, const at::Tensor& from, bool later, const backend& on);

/// Operators of `aten` that have a kernel for the host and none for `key`, in full: "aten::add.Tensor".
std::vector<c10::OperatorName> operators_without_kernel(c10::DispatchKey key);

/// Registers `kernel`, a boxed function that calls `run`, for all operators that `key` lacks.
/// A fallback would not do: it would decompose composite operators, and so change bits.
template <c10::BoxedKernel::BoxedKernelFunction* kernel>
void serve_operators(torch::Library& library, c10::DispatchKey key, const std::set<std::string>& except = {}) {
  for (const auto& op : operators_without_kernel(key)) {
    if (except.count(op.name) != 0) continue;
    const std::string name = op.name.substr(std::string("aten::").size());
    library.impl((op.overload_name.empty() ? name : name + "." + op.overload_name).c_str(),
                 torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

}  // namespace emulated
