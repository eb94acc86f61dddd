// SPDX-License-Identifier: Apache-2.0
/// @file
/// Fused layers that PyTorch has for CUDA only: RMS norm and recurrent cells. They are composed of operators of the host, so they
/// agree with the layers of the host up to rounding.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "cuda_kernels.hpp"

namespace emulated::cuda {
namespace {

using at::Tensor;
using maybe = std::optional<Tensor>;

bool has(const maybe& t) { return t && t->defined(); }
Tensor with_bias(const Tensor& gates, const maybe& bias) { return has(bias) ? gates + *bias : gates; }
/// The gradient through a sigmoid with the result `y`.
Tensor through_sigmoid(const Tensor& gradient, const Tensor& y) { return gradient * y * (1 - y); }
Tensor through_tanh(const Tensor& gradient, const Tensor& y) { return gradient * (1 - y * y); }

// --- RMS norm ----------------------------------------------------------------------------------------------------------------

void rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) { run(op, stack, device()); }

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& gradient, const Tensor& input, at::IntArrayRef shape,
                                             const Tensor& rstd, const maybe& weight, std::array<bool, 2> wanted) {
  std::vector<std::int64_t> inner, outer;
  const auto dims = input.dim(), first = dims - static_cast<std::int64_t>(shape.size());
  for (std::int64_t d = 0; d < dims; ++d) (d < first ? outer : inner).push_back(d);
  const auto normal = input * rstd;
  std::tuple<Tensor, Tensor> result;
  if (wanted[0]) {
    const auto g = has(weight) ? gradient * *weight : gradient;
    std::get<0>(result) = (rstd * (g - normal * (g * normal).mean(inner, true))).to(input.scalar_type());
  }
  if (wanted[1] && has(weight)) {
    const auto g = gradient * normal;
    std::get<1>(result) = (outer.empty() ? g : g.sum(outer)).to(weight->scalar_type());
  }
  return result;
}

// --- recurrent cells ---------------------------------------------------------------------------------------------------------

/// The last result is for the backward: the input, forget, cell and output gates.
std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, const Tensor& hidden, const Tensor& cell, const maybe& of_input,
                                        const maybe& of_hidden) {
  const auto parts = (with_bias(input, of_input) + with_bias(hidden, of_hidden)).chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), fresh = parts[2].tanh(), out = parts[3].sigmoid();
  const auto c = forget * cell + in * fresh;
  return {out * c.tanh(), c, at::cat({in, forget, fresh, out}, 1)};
}

/// @return gradients of the gates, the cell and the bias
std::tuple<Tensor, Tensor, Tensor> lstm_backward(const maybe& of_output, const maybe& of_cell, const Tensor& cell,
                                                 const Tensor& next_cell, const Tensor& gates, bool biased) {
  const auto parts = gates.chunk(4, 1);
  const auto &in = parts[0], &forget = parts[1], &fresh = parts[2], &out = parts[3];
  const auto y = next_cell.tanh();
  const auto g = has(of_output) ? *of_output : at::zeros_like(next_cell);
  const auto c = through_tanh(g * out, y) + (has(of_cell) ? *of_cell : at::zeros_like(next_cell));
  const auto all = at::cat({through_sigmoid(c * fresh, in), through_sigmoid(c * cell, forget), through_tanh(c * in, fresh),
                            through_sigmoid(g * y, out)},
                           1);
  return {all, c * forget, biased ? all.sum(0) : Tensor()};
}

/// The last result is for the backward: reset, update, new value, old state, hidden part of the new value.
std::tuple<Tensor, Tensor> gru(const Tensor& input, const Tensor& hidden, const Tensor& state, const maybe& of_input,
                               const maybe& of_hidden) {
  const auto i = with_bias(input, of_input).chunk(3, 1), h = with_bias(hidden, of_hidden).chunk(3, 1);
  const auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + h[2] * reset).tanh();
  return {(state - fresh) * update + fresh, at::cat({reset, update, fresh, state, h[2]}, 1)};
}

/// @return gradients of the input's gates, the hidden gates, the state and both biases
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& g, const Tensor& saved, bool biased) {
  const auto parts = saved.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &state = parts[3], &hidden = parts[4];
  const auto of_fresh = through_tanh(g * (1 - update), fresh);
  const auto of_update = through_sigmoid(g * (state - fresh), update), of_reset = through_sigmoid(of_fresh * hidden, reset);
  const auto of_input = at::cat({of_reset, of_update, of_fresh}, 1),
             of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, g * update, biased ? of_input.sum(0) : Tensor(), biased ? of_hidden.sum(0) : Tensor()};
}

}  // namespace

void register_layers(torch::Library& library) {
  library.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&rms_norm>());
  library.impl("_fused_rms_norm_backward", rms_norm_backward);
  library.impl("_thnn_fused_lstm_cell", lstm);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward);
  library.impl("_thnn_fused_gru_cell", gru);
  library.impl("_thnn_fused_gru_cell_backward", gru_backward);
}

}  // namespace emulated::cuda
