// SPDX-License-Identifier: Apache-2.0
/// @file
/// Problems for tests and benchmarks: random problems and standard training graphs. Equal random generators give equal problems
/// on every platform, because no distribution of the standard library is used.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>

namespace remat::testing {

/// An integer in [low, high], uniform except for the modulo bias.
inline std::int64_t uniform(std::mt19937_64& g, std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(g() % static_cast<std::uint64_t>(high - low + 1));
}

/// True with probability `percent` / 100.
inline bool chance(std::mt19937_64& g, int percent) { return uniform(g, 0, 99) < percent; }

/// Sizes and probabilities of a random problem.
struct random_options {
  std::size_t operations = 7;  ///< number of operations, >= 1
  std::size_t sources = 2;     ///< number of values without a producer, >= 1
  std::size_t outputs = 2;     ///< largest number of outputs of an operation, >= 1
  std::size_t inputs = 3;      ///< largest number of inputs of an operation, >= 1
  std::int64_t bytes = 9;      ///< sizes are in [1, bytes], bytes
  std::int64_t seconds = 9;    ///< times are whole numbers in [1, seconds], s
  std::int64_t workspace = 3;  ///< workspaces are in [0, workspace], bytes
  int held = 50;               ///< per cent of the sources that are held
  int once = 0;                ///< per cent of the operations that are once-only
  int density = 50;            ///< per cent chance that an operation takes one more input
  int target = 15;             ///< per cent of the values that are targets, besides the outputs of the last operation
};

/// A random problem.
/// @param g the source of randomness
/// @param o sizes and probabilities
/// Complexity: O(operations (inputs + outputs)).
/// @code
/// std::mt19937_64 g(1);
/// const remat::problem p = remat::testing::random_problem(g, {.operations = 5, .once = 20});
/// @endcode
inline problem random_problem(std::mt19937_64& g, const random_options& o = {}) {
  std::vector<value> values;
  std::vector<operation> operations;
  std::vector<value_id> targets;
  for (std::size_t i = 0; i < o.sources; ++i) {
    values.push_back({"s" + std::to_string(i), uniform(g, 1, o.bytes), false});
    values.back().held = chance(g, o.held);
  }
  for (std::size_t i = 0; i < o.operations; ++i) {
    operation op;
    op.name = "o" + std::to_string(i);
    const auto count = static_cast<std::int64_t>(values.size());
    op.inputs.push_back(static_cast<index_t>(chance(g, 60) ? count - 1 : uniform(g, 0, count - 1)));
    while (op.inputs.size() < o.inputs && chance(g, o.density))
      op.inputs.push_back(static_cast<index_t>(uniform(g, 0, count - 1)));
    const auto outputs = uniform(g, 1, static_cast<std::int64_t>(o.outputs));
    for (std::int64_t k = 0; k < outputs; ++k) {
      op.outputs.push_back(static_cast<index_t>(values.size()));
      values.push_back({"v" + std::to_string(i) + "_" + std::to_string(k), uniform(g, 1, o.bytes), false});
      if (i + 1 == o.operations || chance(g, o.target)) targets.push_back(op.outputs.back());
    }
    op.seconds = static_cast<double>(uniform(g, 1, o.seconds));
    op.workspace = uniform(g, 0, o.workspace);
    op.once = chance(g, o.once);
    operations.push_back(std::move(op));
  }
  return problem("random", std::move(values), std::move(operations), std::move(targets));
}

/// One layer of a training chain. The forward reads the input activation. The backward reads the gradient of the output, the
/// input activation and the saved value. It yields the gradients of the input and of the parameters.
struct layer {
  bytes_t activation = 1;          ///< bytes of the output, and of its gradient
  double forward = 1;              ///< s
  double backward = 1;             ///< s
  bytes_t saved = 0;               ///< bytes of the saved value, read by the backward only; none if 0
  bytes_t parameter = 0;           ///< bytes of the parameter gradient, a target; none if 0
  bytes_t forward_workspace = 0;   ///< bytes
  bytes_t backward_workspace = 0;  ///< bytes
  bool once = false;               ///< the forward runs once only
};

/// A training chain: forward of all layers, loss, backward of all layers. Targets are the gradients of input and parameters.
/// @param layers the layers, first to last
/// @param input  bytes of the input, which is held
/// @param loss   time of the loss, s; the loss reads the last activation and yields its gradient
/// Complexity: O(layers).
inline problem training_chain(const std::vector<layer>& layers, bytes_t input = 0, double loss = 1) {
  std::vector<value> values = {{"x0", input, true}};
  std::vector<operation> operations;
  std::vector<value_id> activations = {0}, saved, targets;
  const auto add = [&](const std::string& name, bytes_t bytes) {
    values.push_back({name, bytes, false});
    return static_cast<index_t>(values.size() - 1);
  };
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto& l = layers[i];
    const auto n = std::to_string(i + 1);
    operation op{"forward" + n, {activations.back()}, {add("x" + n, l.activation)}, l.forward, l.forward_workspace, l.once};
    activations.push_back(op.outputs[0]);
    saved.push_back(none);
    if (l.saved > 0) op.outputs.push_back(saved.back() = add("saved" + n, l.saved));
    operations.push_back(std::move(op));
  }
  auto gradient = add("dx" + std::to_string(layers.size()), layers.empty() ? input : layers.back().activation);
  operations.push_back({"loss", {activations.back()}, {gradient}, loss});
  for (std::size_t i = layers.size(); i-- > 0;) {
    const auto& l = layers[i];
    operation op{"backward" + std::to_string(i + 1), {activations[i], gradient}, {}, l.backward, l.backward_workspace};
    if (saved[i] != none) op.inputs.push_back(saved[i]);
    gradient = add("dx" + std::to_string(i), i == 0 ? input : layers[i - 1].activation);
    op.outputs.push_back(gradient);
    if (l.parameter > 0) {
      op.outputs.push_back(add("dw" + std::to_string(i + 1), l.parameter));
      targets.push_back(op.outputs.back());
    }
    operations.push_back(std::move(op));
  }
  targets.push_back(gradient);
  return problem("chain", std::move(values), std::move(operations), std::move(targets));
}

/// A training chain of 2 n + 1 nodes of one byte and one second each: n forward nodes, a loss and n backward nodes. Backward node
/// i reads forward node i and the node before itself. Reference: `gen_linear_graph` of Checkmate.
inline problem unit_training_chain(std::size_t n) {
  std::vector<value> values;
  std::vector<operation> operations;
  for (std::size_t i = 0; i < 2 * n + 1; ++i) {
    values.push_back({"v" + std::to_string(i), 1, false});
    operation op;
    op.name = i < n ? "forward" + std::to_string(i + 1) : i == n ? "loss" : "backward" + std::to_string(2 * n + 1 - i);
    if (i > 0) op.inputs.push_back(static_cast<index_t>(i - 1));
    if (i > n) op.inputs.push_back(static_cast<index_t>(2 * n - i));  // its forward node
    op.outputs = {static_cast<index_t>(i)};
    op.seconds = 1;
    operations.push_back(std::move(op));
  }
  return problem("unit chain", std::move(values), std::move(operations), {static_cast<index_t>(2 * n)});
}

/// A training chain of random layers.
/// @param g the source of randomness
/// @param n number of layers
inline problem random_training_chain(std::mt19937_64& g, std::size_t n) {
  std::vector<layer> layers(n);
  for (auto& l : layers) {
    l.activation = uniform(g, 1, 9);
    l.forward = static_cast<double>(uniform(g, 1, 9));
    l.backward = static_cast<double>(uniform(g, 1, 9));
    l.saved = uniform(g, 0, 9);
    l.parameter = uniform(g, 0, 3);
    l.forward_workspace = uniform(g, 0, 2);
    l.backward_workspace = uniform(g, 0, 2);
  }
  return training_chain(layers, uniform(g, 1, 9));
}

/// The forward and backward of a stack of pre-norm transformer layers: attention and feed-forward parts with residual
/// connections, dropout (with two outputs), a mask that every layer reads, and a gradient for each weight.
/// @param layers number of layers, >= 1
/// @param tokens sequence length; scores take tokens^2 bytes, activations tokens * width bytes
/// @param width  model width
/// Complexity: O(layers).
inline problem transformer_training_graph(std::size_t layers, bytes_t tokens = 64, bytes_t width = 32) {
  std::vector<value> values;
  std::vector<operation> operations;
  std::vector<value_id> targets;
  const bytes_t act = tokens * width, square = width * width, scores = tokens * tokens;
  const auto source = [&](const std::string& name, bytes_t bytes) {
    values.push_back({name, bytes, true});
    return static_cast<index_t>(values.size() - 1);
  };
  const auto op = [&](const std::string& name, std::vector<value_id> inputs, const std::vector<bytes_t>& outputs,
                      double seconds) {
    operation o{name, std::move(inputs), {}, seconds};
    for (auto b : outputs) {
      o.outputs.push_back(static_cast<index_t>(values.size()));
      values.push_back({name + ":" + std::to_string(o.outputs.size() - 1), b, false});
    }
    operations.push_back(o);
    return operations.back().outputs;
  };
  struct saved {
    index_t wq, wo, w1, w2, x, norm1, stats1, qkv, probs, dropped, keep, context, y, norm2, stats2, hidden, gelu;
  };
  const double light = 1e-3, heavy = 2e-2;
  std::vector<saved> stack(layers);
  const auto input = source("input", act);
  for (auto& s : stack) {
    s.wq = source("wq", 3 * square);
    s.wo = source("wo", square);
    s.w1 = source("w1", 4 * square);
    s.w2 = source("w2", 4 * square);
  }
  const auto mask = op("mask", {input}, {scores}, light)[0];
  auto x = op("embed", {input}, {act}, light)[0];
  for (auto& s : stack) {
    s.x = x;
    auto norm = op("norm1", {x}, {act, 2 * tokens}, light);
    s.norm1 = norm[0], s.stats1 = norm[1];
    s.qkv = op("qkv", {s.norm1, s.wq}, {3 * act}, 3 * heavy)[0];
    const auto raw = op("scores", {s.qkv, mask}, {scores}, heavy)[0];
    s.probs = op("softmax", {raw}, {scores}, light)[0];
    auto drop = op("dropout", {s.probs}, {scores, scores / 4 + 1}, light);
    s.dropped = drop[0], s.keep = drop[1];
    s.context = op("context", {s.dropped, s.qkv}, {act}, heavy)[0];
    const auto projected = op("project", {s.context, s.wo}, {act}, heavy)[0];
    s.y = op("residual1", {x, projected}, {act}, light)[0];
    norm = op("norm2", {s.y}, {act, 2 * tokens}, light);
    s.norm2 = norm[0], s.stats2 = norm[1];
    s.hidden = op("expand", {s.norm2, s.w1}, {4 * act}, 4 * heavy)[0];
    s.gelu = op("gelu", {s.hidden}, {4 * act}, 4 * light)[0];
    const auto shrunk = op("shrink", {s.gelu, s.w2}, {act}, 4 * heavy)[0];
    x = op("residual2", {s.y, shrunk}, {act}, light)[0];
  }
  auto dx = op("loss", {x}, {act}, heavy)[0];
  for (std::size_t i = layers; i-- > 0;) {
    const auto& s = stack[i];
    const auto dgelu = op("dgelu", {dx, s.w2}, {4 * act}, 4 * heavy)[0];
    targets.push_back(op("dw2", {dx, s.gelu}, {4 * square}, 4 * heavy)[0]);
    const auto dhidden = op("dhidden", {dgelu, s.hidden}, {4 * act}, 4 * light)[0];
    const auto dnorm2 = op("dnorm2", {dhidden, s.w1}, {act}, 4 * heavy)[0];
    targets.push_back(op("dw1", {dhidden, s.norm2}, {4 * square}, 4 * heavy)[0]);
    const auto dy0 = op("norm2_backward", {dnorm2, s.y, s.stats2}, {act}, light)[0];
    const auto dy = op("add1", {dx, dy0}, {act}, light)[0];
    const auto dcontext = op("dcontext", {dy, s.wo}, {act}, heavy)[0];
    targets.push_back(op("dwo", {dy, s.context}, {square}, heavy)[0]);
    const auto ddropped = op("ddropped", {dcontext, s.qkv}, {scores}, heavy)[0];
    const auto dv = op("dvalue", {dcontext, s.dropped}, {act}, heavy)[0];
    const auto dprobs = op("dropout_backward", {ddropped, s.keep}, {scores}, light)[0];
    const auto dscores = op("softmax_backward", {dprobs, s.probs}, {scores}, light)[0];
    const auto dqkv = op("dqkv", {dscores, s.qkv, dv}, {3 * act}, 2 * heavy)[0];
    const auto dnorm1 = op("dnorm1", {dqkv, s.wq}, {act}, 3 * heavy)[0];
    targets.push_back(op("dwq", {dqkv, s.norm1}, {3 * square}, 3 * heavy)[0]);
    const auto dx0 = op("norm1_backward", {dnorm1, s.x, s.stats1}, {act}, light)[0];
    dx = op("add2", {dy, dx0}, {act}, light)[0];
  }
  targets.push_back(dx);
  return problem("transformer", std::move(values), std::move(operations), std::move(targets));
}

}  // namespace remat::testing
