// SPDX-License-Identifier: Apache-2.0
/// @file
/// A plain and a planned module, for tests of hostile modules.
#pragma once

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/DistributionsHelper.h>

#include <catch2/catch.hpp>
#include <functional>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>

#include "compare.hpp"
#include "devices.hpp"
#include "quick.hpp"

namespace probes_tests {

using namespace remat;
namespace rt = remat::pytorch;
using at::Tensor;
using Catch::Contains;
using tensor_list = std::vector<Tensor>;

/// A module with the given parameters and forward.
struct any_module : ::torch::nn::Module {
  using step = std::function<tensor_list(any_module&, const tensor_list&)>;
  any_module(const tensor_list& given, step f) : run(std::move(f)) {
    for (const auto& t : given) weights.push_back(register_parameter("w" + std::to_string(weights.size()), t.clone()));
  }
  tensor_list forward(const tensor_list& x) { return run(*this, x); }
  Tensor w(std::size_t i = 0) const { return weights[i]; }

  tensor_list weights;
  Tensor member;
  double scalar = 1;
  step run;
};

/// A module twice: plain, and with a runner.
struct pair_of_modules {
  explicit pair_of_modules(const std::function<std::shared_ptr<any_module>()>& make, const rt::wrap_options& o = testing::quick())
      : plain(seeded(make)),
        planned(seeded(make)),
        run(
            planned, [m = planned](const tensor_list& x) { return m->forward(x); }, o) {}
  static std::shared_ptr<any_module> seeded(const std::function<std::shared_ptr<any_module>()>& make) {
    ::torch::manual_seed(11);
    return make();
  }

  /// Runs one step of each module, with inputs made anew from a seed, and compares all observable results.
  /// @param use the use of the outputs by the caller; returns the loss, or nothing
  void step(
      int seed, const std::function<tensor_list()>& inputs,
      const std::function<Tensor(const tensor_list&, const tensor_list&)>& use = [](const tensor_list& out, const tensor_list&) {
        Tensor sum = ::torch::zeros({});
        for (const auto& o : out)
          if (o.requires_grad()) sum = sum + (o * o).sum();  // the gradient has the layout of the output
        return sum;
      }) {
    INFO("step " << seed);
    tensor_list in[2], out[2];
    rt::generator_state state[2];
    Tensor of_device[2];
    for (int k = 0; k < 2; ++k) {
      turn = k;
      ::torch::manual_seed(static_cast<std::uint64_t>(seed) + 100);
      in[k] = inputs();
      out[k] = k == 0 ? plain->forward(in[k]) : run.forward(in[k]);
      if (const auto loss = use(out[k], in[k]); loss.defined()) loss.backward();
      state[k] = rt::generator_state::now();
      of_device[k] = state_of_test_generator();
    }
    REQUIRE(out[0].size() == out[1].size());
    for (std::size_t i = 0; i < out[0].size(); ++i) {
      INFO("output " << i);
      CHECK(same_bits(out[0][i], out[1][i]));
      CHECK(out[0][i].requires_grad() == out[1][i].requires_grad());
      CHECK(out[0][i]._version() == out[1][i]._version());
    }
    for (std::size_t i = 0; i < in[0].size(); ++i) {
      INFO("input " << i);
      CHECK(same_bits(in[0][i], in[1][i]));
      if (!in[0][i].defined()) continue;
      CHECK(same_bits(in[0][i].grad(), in[1][i].grad()));
      CHECK(in[0][i]._version() == in[1][i]._version());
    }
    CHECK(state[0] == state[1]);
    CHECK(same_bits(of_device[0], of_device[1]));
    const auto a = plain->named_parameters(), b = planned->named_parameters();
    for (const auto& p : a) {
      INFO(p.key());
      CHECK(same_bits(p.value(), b[p.key()]));
      CHECK(same_bits(p.value().grad(), b[p.key()].grad()));
      CHECK(p.value()._version() == b[p.key()]._version());
    }
    const auto x = plain->named_buffers(), y = planned->named_buffers();
    for (const auto& p : x) {
      INFO(p.key());
      CHECK(same_bits(p.value(), y[p.key()]));
      CHECK(p.value()._version() == y[p.key()]._version());
    }
  }
  void zero_grad() {
    plain->zero_grad();
    planned->zero_grad();
  }

  std::shared_ptr<any_module> plain, planned;
  testing::runner run;
  int turn = 0;  ///< in `step`: 0 for the plain module, 1 for the planned module
};

inline Tensor square() { return ::torch::randn({6, 6}); }
inline tensor_list one_input() { return {::torch::randn({4, 6})}; }
inline std::shared_ptr<any_module> with(const tensor_list& weights, any_module::step f) {
  return std::make_shared<any_module>(weights, std::move(f));
}

}  // namespace probes_tests
