// SPDX-License-Identifier: Apache-2.0
/// @file
/// Fused attention of the emulated CUDA device: PyTorch's CUDA operators, computed by the host's flash attention. So models have
/// the same bits on the host and on the device.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_kernels.hpp"

namespace emulated::cuda {
namespace {

using at::Tensor;
using torch::jit::Stack;

/// If the host would use flash attention: flash attention, or memory-efficient attention with a mask. Otherwise the
/// decomposition.
std::int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
                    bool causal, std::optional<double> scale, bool grouped) {
  constexpr auto decomposed = static_cast<std::int64_t>(sdp::SDPBackend::math);
  const bool masked = mask && mask->defined();
  if (dropout > 0 || (masked && mask->requires_grad())) return decomposed;
  Stack stack{q, k, v, masked ? c10::IValue(*mask) : c10::IValue(), dropout, causal, scale, grouped};
  run("aten::_fused_sdp_choice", "", &stack, device());
  if (stack.at(0).toInt() != static_cast<std::int64_t>(sdp::SDPBackend::flash_attention)) return decomposed;
  return static_cast<std::int64_t>(masked ? sdp::SDPBackend::efficient_attention : sdp::SDPBackend::flash_attention);
}

/// Calls the kernel of the host. @return output, logsumexp
std::pair<Tensor, Tensor> attend(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal,
                                 const c10::IValue& mask, std::optional<double> scale) {
  TORCH_CHECK(dropout == 0, "emulated: fused attention has no dropout");
  Stack stack{q, k, v, dropout, causal, mask, scale};
  run("aten::_scaled_dot_product_flash_attention_for_cpu", "", &stack, device());
  return {stack.at(0).toTensor(), stack.at(1).toTensor()};
}

/// @return gradients of query, key and value
std::tuple<Tensor, Tensor, Tensor> attend_backward(const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v,
                                                   const Tensor& out, const Tensor& logsumexp, double dropout, bool causal,
                                                   const c10::IValue& mask, std::optional<double> scale) {
  Stack stack{gradient, q, k, v, out, logsumexp, dropout, causal, mask, scale};
  run("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "", &stack, device());
  return {stack.at(0).toTensor(), stack.at(1).toTensor(), stack.at(2).toTensor()};
}

c10::IValue mask_or_none(const Tensor& mask) { return mask.defined() ? c10::IValue(mask) : c10::IValue(); }

// --- flash attention ---------------------------------------------------------------------------------------------------------

using forward_result = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

forward_result forward(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool debug,
                       std::optional<double> scale) {
  TORCH_CHECK(!debug, "emulated: fused attention has no mask for debugging");
  const auto [output, logsumexp] = attend(q, k, v, dropout, causal, {}, scale);
  const auto random = at::empty({2}, q.options().dtype(at::kUInt64));
  const auto none = at::empty({0}, q.options().dtype(at::kUInt64));
  return {output, logsumexp, {}, {}, q.sym_size(2), k.sym_size(2), random, none, at::empty({0}, q.options())};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& gradient, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt,
                                            c10::SymInt, double dropout, bool causal, const Tensor&, const Tensor&,
                                            std::optional<double> scale) {
  return attend_backward(gradient, q, k, v, out, logsumexp, dropout, causal, {}, scale);
}

// --- memory-efficient attention ----------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& q, const Tensor& k, const Tensor& v,
                                                     const std::optional<Tensor>& mask, bool, double dropout, bool causal,
                                                     std::optional<double> scale) {
  const auto [output, logsumexp] = attend(q, k, v, dropout, causal, mask ? mask_or_none(*mask) : c10::IValue(), scale);
  const auto random = at::empty({}, q.options().dtype(at::kLong));
  return {output, logsumexp, random, random.clone()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& gradient, const Tensor& q, const Tensor& k,
                                                              const Tensor& v, const Tensor& mask, const Tensor& out,
                                                              const Tensor& logsumexp, const Tensor&, const Tensor&,
                                                              double dropout, std::array<bool, 4> wanted, bool causal,
                                                              std::optional<double> scale) {
  if (!gradient.defined()) return {};
  TORCH_CHECK(!wanted[3], "emulated: fused attention has no gradient of the mask");
  auto [a, b, c] = attend_backward(gradient, q, k, v, out, logsumexp, dropout, causal, mask_or_none(mask), scale);
  return {a, b, c, {}};
}

}  // namespace

void register_attention(torch::Library& library) {
  library.impl("_fused_sdp_choice", choose);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);  // attention bypasses the dispatcher
  library.impl("_scaled_dot_product_flash_attention", forward);
  library.impl("_scaled_dot_product_flash_attention_backward", backward);
  library.impl("_scaled_dot_product_efficient_attention", efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
}

}  // namespace emulated::cuda
