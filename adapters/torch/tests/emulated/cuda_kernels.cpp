// SPDX-License-Identifier: Apache-2.0
/// @file
/// Kernels of the emulated CUDA device. Loading this library replaces PyTorch's CUDA kernels by kernels of the host. Tensors, the
/// caching allocator, streams, events, generators and graphs remain PyTorch's own.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <set>
#include <string>

#include "cuda_kernels.hpp"
#include "cuda_runtime.hpp"

namespace emulated::cuda {
namespace {

class cuda_backend final : public backend {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DispatchKey key() const override { return c10::DispatchKey::CUDA; }

  stream& current_stream(c10::DeviceIndex device) const override {
    const auto s = c10::cuda::getCurrentCUDAStream(device).stream();
    return s == nullptr ? default_stream(device < 0 ? current_device() : device) : of(s);
  }

  /// As on CUDA, a captured call gets addresses from which it reads seed and offset at each replay.
  std::function<philox()> draw(const at::Generator& given, c10::DeviceIndex device) const override {
    auto* const generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
        given.defined() ? std::optional(given) : std::nullopt, at::cuda::detail::getDefaultCUDAGenerator(device));
    const std::lock_guard guard(generator->mutex_);
    const at::PhiloxCudaState state = generator->philox_cuda_state(draws_per_call);
    return [state]() -> philox {
      if (!state.captured_) return {state.seed_.val, state.offset_.val};
      const auto at = [](const std::int64_t* p) {
        return static_cast<std::uint64_t>(*reinterpret_cast<std::int64_t*>(kernel_address(p)));
      };
      return {at(state.seed_.ptr), at(state.offset_.ptr) + state.offset_intragraph_};
    };
  }
};

/// Operators that PyTorch's CUDA code runs without a kernel.
const std::set<std::string> kept = {"aten::empty",          "aten::empty_strided",
                                    "aten::as_strided",     "aten::view",
                                    "aten::_reshape_alias", "aten::set_",
                                    "aten::resize_",        "aten::unfold",
                                    "aten::view_as_real",   "aten::view_as_complex",
                                    "aten::alias",          "aten::_pin_memory",
                                    "aten::is_pinned",      "aten::_local_scalar_dense",
                                    "aten::_copy_from",     "aten::copy_",
                                    "aten::record_stream",  "aten::_fused_sdp_choice"};

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack, device()); }

/// Copies between host and device are PyTorch's own, down to cudaMemcpyAsync. So are copies on a device without a change of
/// layout or type.
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool later) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool one_device = to.device() == from.device();
  const bool plain = to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.is_contiguous() &&
                     from.is_contiguous() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
  if (!one_device || plain) return at::native::copy_(to, from, later);
  emulated::copy(to, from, later, device());
  return to;
}

/// Silences PyTorch's warnings about replaced kernels, which are the purpose of this library.
struct silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

bool has_host_kernel(const c10::OperatorHandle& op) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) return true;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  silent handler;
  const c10::WarningUtils::WarningHandlerGuard quiet(&handler);
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::string space = "aten::";
  std::set<std::string> names = {"convolution", "convolution_backward"};  // for all devices, so that cuDNN is not called
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA})
    for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(key)) {
      if (name.name.rfind(space, 0) != 0 || kept.count(name.name) != 0) continue;
      if (!has_host_kernel(dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str()))) continue;
      const auto plain = name.name.substr(space.size());
      names.insert(name.overload_name.empty() ? plain : plain + "." + name.overload_name);
    }
  for (const auto& name : names) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
  library.impl("copy_", copy_);
  register_attention(library);
  register_layers(library);
  at::globalContext().setUserEnabledCuDNN(false);  // batch norm and recurrent layers would call it
}

}  // namespace

const backend& device() {
  static const auto* const only = new cuda_backend;
  return *only;
}

}  // namespace emulated::cuda
