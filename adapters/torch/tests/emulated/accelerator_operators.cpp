// SPDX-License-Identifier: Apache-2.0
/// @file
/// Operators of the accelerator: all operators of the host, and those with other names on accelerators.
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>

#include "accelerator.hpp"

namespace emulated::accelerator {
namespace {

void serve(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack, this_backend()); }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool later) {
  emulated::copy(to, from, later, this_backend());
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) { run("aten::convolution", "", stack, this_backend()); }

/// The host's operator also takes the sizes of the bias, as the fourth argument.
void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto first = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const auto weight = first[2].toTensor();
  const bool transposed = first[6].toBool();
  const std::int64_t groups = first[8].toInt();
  const std::int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(first + 3, c10::List<std::int64_t>({channels}));
  run("aten::convolution_backward", "", stack, this_backend());
}

void record_stream(at::Tensor& t, c10::Stream s) { c10::getDeviceAllocator(kind)->recordStream(t.storage().data_ptr(), s); }

/// Lets `Module::to` in C++ replace the data of a tensor by data on another device.
bool is_compatible(const at::Tensor&, const at::Tensor&) { return true; }

std::int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                              bool grouped) {
  return at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", is_compatible); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", is_compatible);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  serve_operators<&serve>(m, c10::DispatchKey::PrivateUse1);
}

/// As for `copy_`: copies resolve the bits for negation and conjugation.
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

/// Operators of other libraries, which may have a kernel for the host.
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&serve>()); }

}  // namespace
}  // namespace emulated::accelerator

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::accelerator::choose_attention)
}  // namespace at::native
