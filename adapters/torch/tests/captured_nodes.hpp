// SPDX-License-Identifier: Apache-2.0
/// @file
/// Helpers for tests of captured programs: captures, steps in eager mode and by the interpreter, comparisons.
#pragma once

#include <sstream>

#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/io.hpp>
#include <remat/pytorch/profile.hpp>

#include "../src/program/fold.hpp"
#include "compare.hpp"
#include "default_device.hpp"
#include "interpret.hpp"
#include "models.hpp"

#undef CHECK  // of PyTorch's logging: it aborts, and hides that of Catch2
#include <catch2/catch.hpp>

namespace capture_tests {

using at::Tensor;
using remat::none;
using remat::pytorch::cannot_capture;
using remat::pytorch::capture;
using remat::pytorch::captured;
using remat::pytorch::interpreter;
using remat::pytorch::program;
using tensors = std::vector<Tensor>;

/// All state that a step may change, other than its results.
struct world {
  tensors parameters, buffers, grads;
  Tensor generator;
  explicit world(const torch::nn::Module& m)
      : parameters(copies_of(m.parameters())), buffers(copies_of(m.buffers())), generator(state_of_test_generator()) {
    for (const auto& p : m.parameters()) grads.push_back(p.grad().defined() ? p.grad().clone() : Tensor());
  }
  bool operator==(const world& o) const {
    return same_bits(parameters, o.parameters) && same_bits(buffers, o.buffers) && same_bits(grads, o.grads) &&
           same_bits(generator, o.generator);
  }
};

inline void restore_buffers(const torch::nn::Module& m, const tensors& saved) {
  torch::NoGradGuard no_grad;
  const auto buffers = m.buffers();
  for (std::size_t i = 0; i < saved.size(); ++i) buffers[i].copy_(saved[i]);
}

/// Deterministic gradients of the outputs, whose elements differ.
inline tensors output_grads(const tensors& outputs) {
  tensors grads;
  for (const auto& o : outputs)
    grads.push_back(o.is_floating_point() ? at::linspace(0.5, 1.5, o.numel(), o.options().requires_grad(false)).view(o.sizes())
                                          : Tensor());
  return grads;
}

struct step_result {
  tensors outputs, parameter_grads, input_grads, buffers, inputs;
  Tensor generator;
};

inline void clear_grads(const torch::nn::Module& m) {
  for (auto& p : m.parameters()) p.mutable_grad() = Tensor();
}

/// The step in eager mode, with `.backward()`.
inline step_result eager(const models::sample& s, const tensors& inputs, uint64_t seed) {
  torch::manual_seed(seed);
  clear_grads(*s.module);
  tensors fresh;
  for (const auto& x : inputs) fresh.push_back(x.detach().clone().requires_grad_(x.requires_grad()));
  auto outputs = s.forward(fresh);
  const auto grads = output_grads(outputs);
  tensors roots, root_grads;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].requires_grad()) {
      roots.push_back(outputs[i]);
      root_grads.push_back(grads[i]);
    }
  step_result r;
  r.outputs = copies_of(outputs);
  torch::autograd::backward(roots, root_grads);
  for (const auto& p : s.module->parameters())
    if (p.requires_grad() && p.grad().defined()) r.parameter_grads.push_back(p.grad().clone());
  for (const auto& x : fresh) r.input_grads.push_back(x.requires_grad() ? x.grad() : Tensor());
  r.buffers = copies_of(s.module->buffers());
  r.inputs = copies_of(fresh);
  r.generator = state_of_test_generator();
  clear_grads(*s.module);
  return r;
}

inline step_result interpreted(const captured& p, const models::sample& s, const tensors& inputs, uint64_t seed,
                               interpreter::recompute mode, std::size_t* recomputed = nullptr) {
  torch::manual_seed(seed);
  auto fresh = copies_of(inputs);
  auto r = interpreter(*p.step, p.tensors).run(fresh, output_grads, mode, static_cast<unsigned>(seed));
  if (recomputed) *recomputed = r.recomputed;
  return {r.outputs, r.parameter_grads, r.input_grads, copies_of(s.module->buffers()), fresh, state_of_test_generator()};
}

inline void check_equal(const step_result& a, const step_result& b) {
  CHECK(same_bits(a.outputs, b.outputs));
  CHECK(same_bits(a.parameter_grads, b.parameter_grads));
  CHECK(same_bits(a.input_grads, b.input_grads));
  CHECK(same_bits(a.buffers, b.buffers));
  CHECK(same_bits(a.inputs, b.inputs));
  CHECK(same_bits(a.generator, b.generator));
}

inline captured capture_sample(const models::sample& s) {
  return capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers());
}

/// A batch of the same shapes with other random values. Integers are flipped, so that indices stay valid.
inline tensors other_batch(const tensors& inputs) {
  tensors result;
  for (const auto& x : inputs)
    result.push_back(
        (x.is_floating_point() ? torch::randn_like(x.detach()) : x.flip(0).contiguous()).requires_grad_(x.requires_grad()));
  return result;
}

inline std::string text_of(const captured& c) {
  std::ostringstream out;
  remat::pytorch::write_program(out, *c.step);
  return out.str();
}

/// Captures twice: the operators run the first time; their results are known the second time.
inline captured capture_known(const models::sample& s) {
  remat::pytorch::forget_profiles();
  const auto first = text_of(capture_sample(s));
  auto again = capture_sample(s);
  CHECK(text_of(again) == first);
  return again;
}

/// Captures, and compares with eager mode while no node, each node at once, or any node at any time is recomputed.
inline captured check_against_eager(const models::sample& s) {
  const world before(*s.module);
  auto p = capture_known(s);
  REQUIRE(world(*s.module) == before);
  INFO(remat::pytorch::explain(*p.step));
  const auto batch = other_batch(s.inputs);
  const auto expected = eager(s, batch, 7);
  restore_buffers(*s.module, before.buffers);
  using mode = interpreter::recompute;
  for (auto m : {mode::nothing, mode::each_node_twice, mode::random_nodes}) {
    std::size_t recomputed = 0;
    const auto got = interpreted(p, s, batch, 7, m, &recomputed);
    restore_buffers(*s.module, before.buffers);
    check_equal(got, expected);
    CHECK((m == mode::nothing) == (recomputed == 0));
  }
  return p;
}

using function = std::function<tensors(torch::nn::Module&, const tensors&)>;

/// A module with a weight of 6 x 6, a buffer of 6 elements, and the given forward.
inline models::sample small(const std::string& name, const function& f, tensors inputs = {torch::randn({4, 6})}) {
  auto m = std::make_shared<torch::nn::Module>();
  m->register_parameter("weight", torch::randn({6, 6}));
  m->register_buffer("buffer", torch::rand(6));
  return {name, m, [m, f](const tensors& in) { return f(*m, in); }, std::move(inputs)};
}
inline Tensor weight(const torch::nn::Module& m) { return m.named_parameters()["weight"]; }
inline Tensor buffer(const torch::nn::Module& m) { return m.named_buffers()["buffer"]; }

inline std::string refusal(const models::sample& s) {
  const world before(*s.module);
  std::string why;
  try {
    capture_sample(s);
  } catch (const cannot_capture& e) {
    why = e.what();
  }
  CHECK(world(*s.module) == before);
  return why;
}

}  // namespace capture_tests
