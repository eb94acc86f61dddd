// SPDX-License-Identifier: Apache-2.0
/// @file
/// Kernels of the emulated devices: kernels of the host on the bytes of the device. Both emulations use them, each with its own
/// `backend`.
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

/// The generator state from which a call draws its random numbers.
struct philox {
  std::uint64_t seed = 0, offset = 0;
};
/// Number of generator outputs that a random call takes.
constexpr std::uint64_t draws_per_call = 4;

/// The kernels' view of a device of PyTorch. One object per process, never destroyed.
class backend {
 public:
  virtual ~backend() = default;
  virtual c10::DeviceType type() const = 0;
  virtual c10::DispatchKey key() const = 0;
  /// The current stream of the calling thread.
  virtual stream& current_stream(c10::DeviceIndex device) const = 0;
  /// Advances the generator by `draws_per_call`, and returns a function for the state from which the call draws. If `given` is
  /// undefined, the default generator of `device` is used. The function is called when the kernel runs, and at each replay of a
  /// captured kernel, so it must return the state of that moment. It is not called during a capture.
  virtual std::function<philox()> draw(const at::Generator& given, c10::DeviceIndex device) const = 0;
};

/// Runs the operator on tensors of the device, by the kernel of the host. Allocations of the kernel come from the allocator of
/// the device. Takes the arguments from the stack, and puts the results there.
/// @throws capture_error if the operator looks at data and the stream is captured
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, const backend& on);

/// `run` for an operator given by its name, such as "aten::convolution".
void run(const char* name, const char* overload, torch::jit::Stack* stack, const backend& on);

/// `to.copy_(from, later)` for at least one tensor on the device. Waits on the host where CUDA does.
void copy(const at::Tensor& to, const at::Tensor& from, bool later, const backend& on);

/// Operators of `aten` with a kernel for the host and without one for `key`, with full names: "aten::add.Tensor".
std::vector<c10::OperatorName> operators_without_kernel(c10::DispatchKey key);

/// Registers `kernel`, a boxed function that calls `run`, for all operators that `key` lacks. A fallback would decompose
/// composite operators, and so change bits.
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
