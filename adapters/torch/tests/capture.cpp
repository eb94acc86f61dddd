// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <remat/core/evaluate.hpp>
#include <remat/torch/capture.hpp>

#include "interpret.hpp"
#include "models.hpp"

#undef CHECK  // of PyTorch's logging: it aborts, and hides the one of Catch2
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

using at::Tensor;
using remat::none;
using remat::torch::cannot_capture;
using remat::torch::capture;
using remat::torch::interpreter;
using remat::torch::program;
using tensors = std::vector<Tensor>;

namespace {

bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

bool same_bits(const tensors& a, const tensors& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) { return same_bits(x, y); });
}

tensors copies(const tensors& list) {
  tensors result;
  for (const auto& t : list) result.push_back(t.defined() ? t.detach().clone() : t);
  return result;
}

/// Everything a step may change besides its results.
struct world {
  tensors parameters, buffers, grads;
  Tensor generator;
  explicit world(const torch::nn::Module& m)
      : parameters(copies(m.parameters())),
        buffers(copies(m.buffers())),
        generator(at::detail::getDefaultCPUGenerator().get_state()) {
    for (const auto& p : m.parameters()) grads.push_back(p.grad().defined() ? p.grad().clone() : Tensor());
  }
  bool operator==(const world& o) const {
    return same_bits(parameters, o.parameters) && same_bits(buffers, o.buffers) && same_bits(grads, o.grads) &&
           same_bits(generator, o.generator);
  }
};

void restore_buffers(const torch::nn::Module& m, const tensors& saved) {
  torch::NoGradGuard no_grad;
  const auto buffers = m.buffers();
  for (std::size_t i = 0; i < saved.size(); ++i) buffers[i].copy_(saved[i]);
}

/// Gradients of the outputs, deterministic, neither uniform nor contiguous in value.
tensors output_grads(const tensors& outputs) {
  tensors grads;
  for (const auto& o : outputs)
    grads.push_back(o.is_floating_point() ? at::linspace(0.5, 1.5, o.numel(), o.options().requires_grad(false)).view(o.sizes())
                                          : Tensor());
  return grads;
}

struct step_result {
  tensors outputs, parameter_grads, input_grads, buffers;
  Tensor generator;
};

void clear_grads(const torch::nn::Module& m) {
  for (auto& p : m.parameters()) p.mutable_grad() = Tensor();
}

/// The step as PyTorch does it, with `.backward()`.
step_result eager(const models::sample& s, const tensors& inputs, uint64_t seed) {
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
  r.outputs = copies(outputs);
  torch::autograd::backward(roots, root_grads);
  for (const auto& p : s.module->parameters())
    if (p.requires_grad() && p.grad().defined()) r.parameter_grads.push_back(p.grad().clone());
  for (const auto& x : fresh) r.input_grads.push_back(x.requires_grad() ? x.grad() : Tensor());
  r.buffers = copies(s.module->buffers());
  r.generator = at::detail::getDefaultCPUGenerator().get_state();
  clear_grads(*s.module);
  return r;
}

step_result interpreted(const program& p, const models::sample& s, const tensors& inputs, uint64_t seed,
                        interpreter::recompute mode, std::size_t* recomputed = nullptr) {
  torch::manual_seed(seed);
  auto fresh = copies(inputs);
  auto r = interpreter(p).run(fresh, output_grads, mode, static_cast<unsigned>(seed));
  if (recomputed) *recomputed = r.recomputed;
  return {r.outputs, r.parameter_grads, r.input_grads, copies(s.module->buffers()),
          at::detail::getDefaultCPUGenerator().get_state()};
}

void check_equal(const step_result& a, const step_result& b) {
  CHECK(same_bits(a.outputs, b.outputs));
  CHECK(same_bits(a.parameter_grads, b.parameter_grads));
  CHECK(same_bits(a.input_grads, b.input_grads));
  CHECK(same_bits(a.buffers, b.buffers));
  CHECK(same_bits(a.generator, b.generator));
}

program capture_sample(const models::sample& s) {
  return capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers());
}

/// Random values of the same kind; integers are permuted so that indices stay valid.
tensors other_batch(const tensors& inputs) {
  tensors result;
  for (const auto& x : inputs)
    result.push_back(
        (x.is_floating_point() ? torch::randn_like(x.detach()) : x.flip(0).contiguous()).requires_grad_(x.requires_grad()));
  return result;
}

}  // namespace

TEST_CASE("every node of a captured program can be trusted alone") {
  at::set_num_threads(1);
  torch::manual_seed(1);
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const world before(*s.module);
      const auto p = capture_sample(s);
      REQUIRE(world(*s.module) == before);
      INFO(remat::torch::explain(p));
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
      // Negative control: the draws and the batch matter.
      const auto other = interpreted(p, s, s.inputs, 8, mode::nothing);
      restore_buffers(*s.module, before.buffers);
      CHECK_FALSE(same_bits(other.parameter_grads, expected.parameter_grads));
    }
  }
}

TEST_CASE("gradients are laid out like the parameters") {
  for (const auto& s : models::all()) {
    DYNAMIC_SECTION(s.name) {
      const auto p = capture_sample(s);
      REQUIRE(p.parameters.size() == p.parameter_grads.size());
      for (std::size_t i = 0; i < p.parameters.size(); ++i) {
        const auto& v = p.views[p.parameter_grads[i]];
        CHECK(p.parameters[i].sizes() == at::IntArrayRef(v.sizes));
        CHECK(p.parameters[i].strides() == at::IntArrayRef(v.strides));
      }
    }
  }
}
