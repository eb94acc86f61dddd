// SPDX-License-Identifier: Apache-2.0
// Hostile modules: kept and foreign memory, gradients, generators.
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/DistributionsHelper.h>

#include <catch2/catch.hpp>
#include <remat/pytorch/memory.hpp>

#include "compare.hpp"
#include "default_device.hpp"
#include "pair_of_modules.hpp"
#include "quick.hpp"

using namespace probes_tests;

TEST_CASE("a step with another shape does not keep the memory of the previous shape", "[device]") {
  const on_test_device there;
  pair_of_modules m([] {
    return with({::torch::randn({64, 64})}, [](auto& self, const tensor_list& x) -> tensor_list {
      auto y = x[0];
      for (int k = 0; k < 6; ++k) y = y.matmul(self.w()).tanh();
      return {y};
    });
  });
  const rt::meter counting;
  const auto base = rt::meter::live();
  bytes_t alone = 0;
  for (const int64_t batch : {512, 511, 512, 511}) {
    rt::meter::reset_peak();
    const auto loss = m.run.forward({::torch::randn({batch, 64})})[0].sum();  // nobody holds the output
    loss.backward();
    m.planned->zero_grad();
    if (alone == 0) alone = rt::meter::peak() - base;
    INFO("batch " << batch);
    CHECK(rt::meter::peak() - base <= alone + (bytes_t{64} << 10));
  }
  m.run.forward({::torch::randn({512, 64})})[0].sum().backward();
  m.run.release();
  CHECK(rt::meter::live() - base <= (bytes_t{64} << 10));  // the gradient
  m.zero_grad();
  m.step(3, [] { return tensor_list{::torch::randn({512, 64})}; });
}

TEST_CASE("memory that an operator keeps, and another allocator, are noticed") {
  struct front : c10::Allocator {
    c10::Allocator* base = c10::GetCPUAllocator();
    c10::DataPtr allocate(std::size_t n) override { return base->allocate(n); }
    c10::DeleterFnPtr raw_deleter() const override { return base->raw_deleter(); }
    void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
  };
  pair_of_modules m(
      [] { return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list { return {x[0].matmul(self.w())}; }); });
  m.step(0, one_input);
  static front other;
  const auto ours = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&other, 100);
  CHECK_THROWS_WITH(m.run.forward(one_input()), Contains("allocator"));
  c10::SetCPUAllocator(ours, 100);
  m.zero_grad();
  m.step(1, one_input);

  std::vector<rt::planned_block> plan(2);
  alignas(64) static char place[128];
  plan[0] = {64, 0, place, true};
  plan[1] = {64, 0, place + 64, false};
  rt::planned_allocations planned;
  planned.plan(plan);
  planned.start();
  auto temporary = at::empty({16}), result = at::empty({16});
  CHECK_FALSE(planned.finished());
  temporary.reset();
  planned.stop();
  CHECK(planned.finished());
}

TEST_CASE("gradients are added to existing gradients as soon as they are complete", "[device]") {
  const on_test_device there;
  auto deep = [] {
    tensor_list weights;
    for (int k = 0; k < 12; ++k) weights.push_back(::torch::randn({128, 128}));
    return with(weights, [](auto& self, const tensor_list& x) -> tensor_list {
      auto y = x[0];
      for (const auto& w : self.weights) y = y.matmul(w).tanh();
      return {y, y.sum()};
    });
  };
  const auto input = [] { return tensor_list{::torch::randn({4, 128})}; };
  const auto both = [](const tensor_list& out, const tensor_list&) { return (out[0] * out[0]).sum() + out[1]; };
  SECTION("in the memory of one set of gradients") {
    pair_of_modules m(deep);
    const bytes_t set = 12 * 128 * 128 * 4;
    m.step(0, input, both);
    m.step(1, input, both);
    m.step(2, input, both);
    m.zero_grad();
    const auto held = rt::meter::live();
    rt::meter::reset_peak();
    for (int k = 3; k < 7; ++k) {
      both(m.run.forward(input()), {}).backward();
    }
    CHECK(rt::meter::peak() - held <= set * 115 / 100);
  }
  SECTION("equal to eager mode, in any order with other uses") {
    pair_of_modules m(deep);
    for (int k = 0; k < 3; ++k) m.step(k, input, both);
    auto first = m.planned->w().grad(), second = m.plain->w().grad();
    m.step(3, input, both);
    CHECK(m.planned->w().grad().is_same(first));
    CHECK(first._version() == second._version());
    m.step(4, input, [](const tensor_list& out, const tensor_list&) { return out[1]; });  // another use of the outputs
    m.step(5, input, [&](const tensor_list& out, const tensor_list&) {  // gradients are reset between forward and backward
      (m.turn == 0 ? m.plain : m.planned)->zero_grad();
      return (out[0] * out[0]).sum() + out[1];
    });
    for (int k = 6; k < 8; ++k) m.step(k, input, both);
    m.step(8, input, [](const tensor_list& out, const tensor_list&) {
      out[1].backward({}, true);
      return Tensor();
    });
    m.step(9, input, [&](const tensor_list& out, const tensor_list&) {  // gradients that do not go to `.grad`
      const auto& self = m.turn == 0 ? m.plain : m.planned;
      const auto g = ::torch::autograd::grad({out[1]}, {self->w()})[0];
      self->w().mutable_grad().mul_(g.sum());
      return Tensor();
    });
    for (const auto& list : {m.plain->parameters(), m.planned->parameters()})
      list[3].register_hook([](const Tensor& g) { return g * 2; });
    for (int k = 10; k < 13; ++k) m.step(k, input, both);
    for (const auto& list : {m.plain->parameters(), m.planned->parameters()}) list[5].mutable_grad() = Tensor();
    for (int k = 13; k < 16; ++k) m.step(k, input, both);
  }
}

TEST_CASE("gradients are None where the used outputs do not lead", "[device]") {
  const on_test_device there;
  pair_of_modules m([] {
    return with({square(), square(), square()}, [](auto& self, const tensor_list& x) -> tensor_list {
      const auto h = x[0].matmul(self.w(0));
      return {h.matmul(self.w(1)), h.matmul(self.w(2)).tanh(), x[1] * 2};
    });
  });
  const auto inputs = [] { return tensor_list{::torch::randn({4, 6}).requires_grad_(), ::torch::randn({2}).requires_grad_()}; };
  for (int k = 0; k < 6; ++k) {
    m.zero_grad();
    m.step(k, inputs, [&](const tensor_list& out, const tensor_list&) { return out[static_cast<std::size_t>(k % 3)].sum(); });
  }
}

TEST_CASE("modules that set and read the generator in any way", "[device]") {
  const on_test_device there;
  auto generator = at::detail::getDefaultCPUGenerator();
  SECTION("draws of different length from one state") {
    pair_of_modules m([generator]() mutable {
      return with({square()}, [generator](auto& self, const tensor_list& x) mutable -> tensor_list {
        const auto before = generator.get_state();
        const auto a = ::torch::rand({6});
        generator.set_state(before);
        const auto b = ::torch::rand({4, 6});
        const auto c = ::torch::rand({6});
        return {(x[0].matmul(self.w()) * a * b * c).tanh()};
      });
    });
    for (int k = 0; k < 4; ++k) m.step(k, one_input);
  }
  SECTION("a seed set by the module") {
    pair_of_modules m([generator]() mutable {
      return with({square()}, [generator](auto& self, const tensor_list& x) mutable -> tensor_list {
        const auto before = generator.get_state();
        ::torch::manual_seed(111);
        const auto a = ::torch::rand({6});
        const auto noise = ::torch::rand({4, 6});
        generator.set_state(before);
        return {(x[0].matmul(self.w()) * a * noise * ::torch::rand({6})).tanh()};
      });
    });
    for (const int k : {0, 11, 2}) m.step(k, one_input);
  }
  SECTION("a generator state that the module restores") {
    pair_of_modules m([generator]() mutable {
      return with({square()}, [generator](auto& self, const tensor_list& x) mutable -> tensor_list {
        const auto before = generator.get_state();
        const auto a = ::torch::rand({6});
        generator.set_state(before);
        return {(x[0].matmul(self.w()) * a).tanh()};
      });
    });
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
  }
  SECTION("a dropout") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        return {::torch::dropout(x[0].matmul(self.w()), 0.5, true)};
      });
    });
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
  }
}

TEST_CASE("foreign memory, undefined inputs, operators that refuse zeros, and a backward within the forward") {
  SECTION("from_blob above and below 1 MiB") {
    for (const int64_t rows : {4, 60000}) {
      pair_of_modules m([rows] {
        return with({square()}, [rows](auto& self, const tensor_list& x) -> tensor_list {
          std::vector<float> numbers(static_cast<std::size_t>(rows) * 6, 0.25F);
          return {x[0].matmul(self.w()).sum() * ::torch::from_blob(numbers.data(), {rows, 6}).sum(0)};
        });
      });
      for (int k = 0; k < 3; ++k) m.step(k, one_input);
    }
  }
  SECTION("an undefined input") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        auto y = x[0].matmul(self.w());
        return {x[1].defined() ? y * x[1] : y};
      });
    });
    for (int k = 0; k < 4; ++k)
      m.step(k, [&] { return tensor_list{::torch::randn({4, 6}), k % 2 ? ::torch::rand({6}) : Tensor()}; });
  }
  SECTION("an inverse, a Cholesky factor and a distribution") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        const auto a = self.w().matmul(self.w().t()) + 6 * ::torch::eye(6);
        const auto chosen = ::torch::multinomial(x[0].abs() + 0.1, 2, true);
        return {::torch::linalg_inv(a).matmul(::torch::linalg_cholesky(a)), x[0].matmul(self.w()).gather(1, chosen)};
      });
    });
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
  }
  SECTION("a backward within the forward") {
    pair_of_modules m([] {
      return with({square(), square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        x[0].matmul(self.w(1)).sum().backward();
        return {x[0].matmul(self.w(0))};
      });
    });
    CHECK_THROWS_WITH(m.run.forward(one_input()), Contains(".grad"));
    CHECK_FALSE(m.planned->w(1).grad().defined());
  }
}
