// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recurrent layers of the accelerator. PyTorch would choose fused cells, which the host does not have. The layers here use the
/// implementations of the host, and so have the same bits. Packed sequences use the fused cells below, whose last bits differ.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

namespace emulated::accelerator {
namespace {

using at::Tensor;
using maybe = std::optional<Tensor>;
using tensors = std::vector<Tensor>;

/// Parameters of one direction of one layer.
struct weights {
  Tensor of_input, of_hidden, bias_of_input, bias_of_hidden, projection;
  Tensor input(const Tensor& x) const { return at::linear(x, of_input, maybe_of(bias_of_input)); }
  Tensor hidden(const Tensor& h) const { return at::linear(h, of_hidden, maybe_of(bias_of_hidden)); }
  static maybe maybe_of(const Tensor& t) { return t.defined() ? maybe(t) : maybe(); }
};

std::vector<weights> gathered(at::TensorList params, bool biases, bool projections) {
  const std::size_t each = (biases ? 4u : 2u) + (projections ? 1u : 0u);
  TORCH_CHECK(params.size() % each == 0, "emulated: wrong number of parameters of a recurrent layer");
  std::vector<weights> all;
  for (std::size_t k = 0; k < params.size(); k += each)
    all.push_back({params[k], params[k + 1], biases ? params[k + 2] : Tensor(), biases ? params[k + 3] : Tensor(),
                   projections ? params[k + each - 1] : Tensor()});
  return all;
}

/// @param gates product of the input and its weights
/// @param state the hidden state and the cell state
tensors lstm_step(const Tensor& gates, const tensors& state, const weights& w) {
  auto parts = w.hidden(state[0]).add_(gates).unsafe_chunk(4, 1);
  const auto in = parts[0].sigmoid_(), forget = parts[1].sigmoid_(), cell = parts[2].tanh_(), out = parts[3].sigmoid_();
  auto c = (forget * state[1]).add_(in.mul(cell));
  auto h = out * c.tanh();
  if (w.projection.defined()) h = at::matmul(h, w.projection.t());
  return {h, c};
}

tensors gru_step(const Tensor& gates, const tensors& state, const weights& w) {
  const auto of_input = gates.unsafe_chunk(3, 1);
  auto of_hidden = w.hidden(state[0]).unsafe_chunk(3, 1);
  const auto reset = of_hidden[0].add_(of_input[0]).sigmoid_(), in = of_hidden[1].add_(of_input[1]).sigmoid_();
  const auto fresh = of_input[2].add(of_hidden[2].mul_(reset)).tanh_();
  return {(state[0] - fresh).mul_(in).add_(fresh)};
}

using step = tensors (*)(const Tensor&, const tensors&, const weights&);

/// One direction of one layer over all time steps. On return, `state` is the last state.
Tensor over_time(step one, const Tensor& input, tensors& state, const weights& w, bool backwards) {
  auto gates = w.input(input).unbind(0);
  if (backwards) std::reverse(gates.begin(), gates.end());
  tensors outputs;
  for (const auto& g : gates) {
    state = one(g, state, w);
    outputs.push_back(state[0]);
  }
  if (backwards) std::reverse(outputs.begin(), outputs.end());
  return at::stack(outputs, 0);
}

struct shape {
  std::int64_t layers;
  double dropout;
  bool train, bidirectional;
};

/// `layer(input, index, backwards)` computes one direction of one layer.
template <class F>
Tensor over_layers(Tensor input, const shape& s, const F& layer) {
  const int directions = s.bidirectional ? 2 : 1;
  for (std::int64_t l = 0; l < s.layers; ++l) {
    tensors outputs;
    for (int d = 0; d < directions; ++d) outputs.push_back(layer(input, static_cast<std::size_t>(l * directions + d), d > 0));
    input = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (s.dropout != 0 && s.train && l < s.layers - 1) input = at::dropout(input, s.dropout, true);
  }
  return input;
}

/// Layers by oneDNN, as on the host.
std::tuple<Tensor, Tensor, Tensor> lstm_of_onednn(const Tensor& given, at::TensorList hx, const std::vector<weights>& all,
                                                  bool biases, const shape& s, bool batch_first) {
  constexpr int is_lstm = 2;
  tensors h, c;
  const auto hidden = hx[0].contiguous(), cell = hx[1].contiguous();
  const auto layer = [&](const Tensor& x, std::size_t k, bool backwards) {
    const auto& w = all[k];
    const auto none = biases ? Tensor() : at::zeros({w.of_input.size(0)}, w.of_input.options());
    const auto at_k = static_cast<std::int64_t>(k);
    auto [y, last_h, last_c, kept] = at::mkldnn_rnn_layer(
        x, w.of_input, w.of_hidden, biases ? w.bias_of_input : none, biases ? w.bias_of_hidden : none, hidden[at_k], cell[at_k],
        backwards, {}, is_lstm, hidden.size(2), s.layers, biases, s.bidirectional, batch_first, s.train);
    h.push_back(last_h);
    c.push_back(last_c);
    return y;
  };
  auto output = over_layers(batch_first ? given.transpose(0, 1).contiguous() : given.contiguous(), s, layer);
  return {batch_first ? output.transpose(0, 1) : output, at::stack(h, 0), at::stack(c, 0)};
}

/// @return the output, and the last states of all layers: hidden states first, then cell states
std::pair<Tensor, std::vector<tensors>> generic(step one, const Tensor& given, const tensors& first,
                                                const std::vector<weights>& all, const shape& s, bool batch_first) {
  std::vector<tensors> last(first.size());
  std::vector<tensors> begin;
  for (const auto& f : first) begin.push_back(f.unbind(0));
  const auto layer = [&](const Tensor& x, std::size_t k, bool backwards) {
    tensors state;
    for (const auto& b : begin) state.push_back(b[k]);
    auto output = over_time(one, x, state, all[k], backwards);
    for (std::size_t i = 0; i < last.size(); ++i) last[i].push_back(state[i]);
    return output;
  };
  auto output = over_layers(batch_first ? given.transpose(0, 1) : given, s, layer);
  return {batch_first ? output.transpose(0, 1) : output, last};
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, at::TensorList hx, at::TensorList params, bool biases,
                                        std::int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  const bool projections = hx[0].size(2) != hx[1].size(2);
  const auto all = gathered(params, biases, projections);
  const shape s{layers, dropout, train, bidirectional};
  if (!projections && at::globalContext().userEnabledMkldnn() && input.scalar_type() == at::kFloat && input.numel() != 0)
    return lstm_of_onednn(input, hx, all, biases, s, batch_first);
  auto [output, last] = generic(&lstm_step, input, {hx[0], hx[1]}, all, s, batch_first);
  return {output, at::stack(last[0], 0), at::stack(last[1], 0)};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input, const Tensor& hx, at::TensorList params, bool biases, std::int64_t layers,
                               double dropout, bool train, bool bidirectional, bool batch_first) {
  const auto all = gathered(params, biases, false);
  auto [output, last] = generic(&gru_step, input, {hx}, all, {layers, dropout, train, bidirectional}, batch_first);
  return {output, at::stack(last[0], 0)};
}

Tensor or_none(const maybe& t) { return t.value_or(Tensor()); }

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& input, at::TensorList hx, const Tensor& w_ih, const Tensor& w_hh,
                                     const maybe& b_ih, const maybe& b_hh) {
  const weights w{w_ih, w_hh, or_none(b_ih), or_none(b_hh), {}};
  auto state = lstm_step(w.input(input), {hx[0], hx[1]}, w);
  return {state[0], state[1]};
}

Tensor gru_cell(const Tensor& input, const Tensor& hx, const Tensor& w_ih, const Tensor& w_hh, const maybe& b_ih,
                const maybe& b_hh) {
  const weights w{w_ih, w_hh, or_none(b_ih), or_none(b_hh), {}};
  return gru_step(w.input(input), {hx}, w)[0];
}

Tensor with_bias(const Tensor& gates, const maybe& bias) { return bias && bias->defined() ? gates + *bias : gates; }

std::tuple<Tensor, Tensor, Tensor> fused_lstm(const Tensor& input, const Tensor& hidden, const Tensor& cx, const maybe& b_ih,
                                              const maybe& b_hh) {
  const auto gates = with_bias(input, b_ih) + with_bias(hidden, b_hh);
  const auto parts = gates.unsafe_chunk(4, 1);
  const auto c = parts[1].sigmoid() * cx + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * c.tanh(), c, gates.detach()};
}

std::tuple<Tensor, Tensor> fused_gru(const Tensor& input, const Tensor& hidden, const Tensor& hx, const maybe& b_ih,
                                     const maybe& b_hh) {
  const auto i = with_bias(input, b_ih).unsafe_chunk(3, 1), h = with_bias(hidden, b_hh).unsafe_chunk(3, 1);
  const auto reset = (h[0] + i[0]).sigmoid(), in = (h[1] + i[1]).sigmoid(), fresh = (i[2] + h[2] * reset).tanh();
  return {(hx - fresh) * in + fresh, fresh.detach()};
}

void implement(torch::Library& m) {
  m.impl("lstm.input", lstm);
  m.impl("gru.input", gru);
  m.impl("lstm_cell", lstm_cell);
  m.impl("gru_cell", gru_cell);
  m.impl("_thnn_fused_lstm_cell", fused_lstm);
  m.impl("_thnn_fused_gru_cell", fused_gru);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { implement(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { implement(m); }  // in inference mode

}  // namespace
}  // namespace emulated::accelerator
