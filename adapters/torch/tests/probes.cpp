// SPDX-License-Identifier: Apache-2.0
/// @file
/// Uses that are easy to get silently wrong, each in the terms of eager mode.
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/DistributionsHelper.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <map>
#include <remat/core/solve.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>
#include <remat/solver/min_cut.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "compare.hpp"
#include "quick.hpp"

using namespace remat;
namespace rt = remat::pytorch;
using at::Tensor;
using Catch::Contains;
using tensor_list = std::vector<Tensor>;

namespace {

/// A module that is what a test makes of it.
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

  /// One step of each, with inputs made anew from a seed, and all that can be seen of it.
  /// @param use what the caller does with the outputs; gives the loss, or nothing
  void step(
      int seed, const std::function<tensor_list()>& inputs,
      const std::function<Tensor(const tensor_list&, const tensor_list&)>& use = [](const tensor_list& out, const tensor_list&) {
        Tensor sum = ::torch::zeros({});
        for (const auto& o : out)
          if (o.requires_grad()) sum = sum + (o * o).sum();  // a gradient laid out like the output
        return sum;
      }) {
    INFO("step " << seed);
    tensor_list in[2], out[2];
    rt::generator_state state[2];
    for (int k = 0; k < 2; ++k) {
      turn = k;
      ::torch::manual_seed(static_cast<std::uint64_t>(seed) + 100);
      in[k] = inputs();
      out[k] = k == 0 ? plain->forward(in[k]) : run.forward(in[k]);
      if (const auto loss = use(out[k], in[k]); loss.defined()) loss.backward();
      state[k] = rt::generator_state::now();
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
  int turn = 0;  ///< of `step`: 0 the plain module, 1 the planned one
};

Tensor square() { return ::torch::randn({6, 6}); }
tensor_list one_input() { return {::torch::randn({4, 6})}; }
std::shared_ptr<any_module> with(const tensor_list& weights, any_module::step f) {
  return std::make_shared<any_module>(weights, std::move(f));
}

}  // namespace

TEST_CASE("hooks of parameters fire where eager fires them, also if they were there before") {
  int calls[2] = {0, 0};
  pair_of_modules m([] {
    return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list { return {x[0].matmul(self.w()).tanh()}; });
  });
  m.plain->w().register_hook([&](const Tensor& g) { return ++calls[0], g * 2; });
  m.planned->w().register_hook([&](const Tensor& g) { return ++calls[1], g * 2; });
  for (int k = 0; k < 3; ++k) m.step(k, one_input);
  CHECK(calls[0] == 3);
  CHECK(calls[1] == 3);
}

TEST_CASE("parameters that share memory, and modules that are registered twice") {
  SECTION("one flat tensor") {
    pair_of_modules m([] {
      auto made = with(
          {}, [](auto& self, const tensor_list& x) -> tensor_list { return {x[0].matmul(self.w(0)).tanh().matmul(self.w(1))}; });
      const auto flat = ::torch::randn({72});
      for (int64_t i = 0; i < 2; ++i) {
        auto part = ::torch::empty({0}).set_(flat.storage(), i * 36, {6, 6}, {6, 1});
        made->weights.push_back(made->register_parameter("part" + std::to_string(i), part));
      }
      return made;
    });
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
    // One of them moves: the other stays.
    for (auto* x : {&m.plain, &m.planned}) (*x)->weights[1].set_data((*x)->weights[1].detach().clone());
    {
      at::NoGradGuard no_grad;
      for (auto* x : {&m.plain, &m.planned}) (*x)->weights[0].mul_(0.5);
    }
    for (int k = 3; k < 6; ++k) m.step(k, one_input);
  }
  SECTION("a submodule twice") {
    pair_of_modules m([] {
      ::torch::nn::Linear shared(6, 6);
      auto made =
          with({}, [shared](auto&, const tensor_list& x) mutable -> tensor_list { return {shared(shared(x[0]).tanh())}; });
      made->register_module("a", shared);
      made->register_module("b", shared);
      return made;
    });
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
  }
}

TEST_CASE("inputs that begin anywhere in their storage, seen as another type") {
  pair_of_modules m([] {
    return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
      return {::torch::view_as_real(::torch::view_as_complex(x[0].view({4, 3, 2})).mul(c10::complex<double>(0, 1)))
                  .view({4, 6})
                  .matmul(self.w())};
    });
  });
  const auto data = ::torch::randn({100});
  for (const int64_t from : {0, 4, 40, 76})
    m.step(static_cast<int>(from), [&] { return tensor_list{data.slice(0, from, from + 24).view({4, 6})}; });
  CHECK(data.storage().nbytes() == 400);
  CHECK_THROWS_AS(m.run.forward({data.slice(0, 3, 27).view({4, 6})}), c10::Error);  // as in eager
  CHECK(data.storage().nbytes() == 400);
}

TEST_CASE("what the backward reads must not change before it") {
  const auto make = [] {
    auto made = with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
      return {(x[0].matmul(self.w()) * self.named_buffers()["scale"]).tanh().matmul(self.member)};
    });
    made->register_buffer("scale", ::torch::rand({6}));
    made->member = ::torch::randn({6, 6});
    return made;
  };
  pair_of_modules m(make);
  m.step(1, one_input);
  for (const bool member : {false, true}) {
    auto out = m.run.forward(one_input())[0].sum();
    (member ? m.planned->member : m.planned->named_buffers()["scale"]).add_(1);
    CHECK_THROWS_WITH(out.backward(), Contains("modified by an inplace operation"));
  }
  (m.plain->named_buffers()["scale"]).add_(1), m.plain->member.add_(1);
  for (auto* x : {&m.plain, &m.planned}) (*x)->named_buffers()["scale"].unsafeGetTensorImpl()->bump_version();
  m.zero_grad();
  {
    const auto counter = m.planned->named_buffers()["scale"]._version();
    auto other = m.plain->named_buffers()["scale"].unsafeGetTensorImpl()->version_counter();
    other.set_version(counter);
  }
  m.step(2, one_input);
}

TEST_CASE("writes of the step show in versions, and outputs share them") {
  pair_of_modules m([] {
    auto made = with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
      self.named_buffers()["count"].add_(1).mul_(2);
      x[1].add_(1);
      const auto h = x[0].matmul(self.w());
      return {h, h.view({-1}), h, x[1], x[1].view({-1}), self.named_buffers()["count"]};
    });
    made->register_buffer("count", ::torch::zeros({1}));
    return made;
  });
  const auto inputs = [] { return tensor_list{::torch::randn({4, 6}), ::torch::zeros({2, 2})}; };
  for (int k = 0; k < 3; ++k) {
    m.step(k, inputs, [](const tensor_list& out, const tensor_list&) { return out[0].sum() + out[2].mean(); });
    m.step(k, inputs, [](const tensor_list& out, const tensor_list& in) {
      CHECK(out[0].is_same(out[2]));
      CHECK(out[3].is_same(in[1]));
      CHECK(out[4].is_alias_of(in[1]));
      const auto before = out[1]._version();
      const auto loss = (out[1] * 2).sum();
      in[1].add_(1);
      CHECK(out[4]._version() == in[1]._version());
      CHECK(out[1]._version() == before);
      return loss;
    });
  }
  auto out = m.run.forward(inputs());
  const auto loss = out[1].sum();
  {
    at::NoGradGuard no_grad;
    out[0].mul_(2);
  }
  CHECK_THROWS_WITH(loss.backward(), Contains("modified by an inplace operation"));
}

TEST_CASE("an output with a gradient in the memory of a parameter must stay as it is") {
  pair_of_modules m([] {
    return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
      return {x[0].matmul(self.w()), self.w().view({-1}), self.w()};
    });
  });
  for (int k = 0; k < 3; ++k) m.step(k, one_input);
  auto out = m.run.forward(one_input());
  const auto loss = out[1].sum();
  {
    at::NoGradGuard no_grad;
    m.planned->w().mul_(2);
  }
  CHECK_THROWS_WITH(loss.backward(), Contains("modified by an inplace operation"));
}

TEST_CASE("members that are replaced are noticed") {
  const auto make = [] {
    auto made =
        with({square()}, [](auto& self, const tensor_list& x) -> tensor_list { return {(x[0] * self.member).matmul(self.w())}; });
    made->member = ::torch::rand({6});
    return made;
  };
  pair_of_modules m(make);
  for (int k = 0; k < 4; ++k) {
    m.step(k, one_input);
    for (auto* x : {&m.plain, &m.planned}) {
      ::torch::manual_seed(static_cast<std::uint64_t>(k));
      (*x)->member = ::torch::rand({6});
    }
  }
}

TEST_CASE("memory read directly while capturing is refused, and scalars are for `verify` and `invalidate`") {
  SECTION("an accessor of an integer input") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        return {x[0].matmul(self.w()) * static_cast<double>(x[1].template accessor<int64_t, 1>()[0])};
      });
    });
    CHECK_THROWS_WITH(m.run.forward({::torch::randn({4, 6}), ::torch::full({1}, 3, ::torch::kLong)}), Contains("directly"));
  }
  SECTION("an activation") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        auto y = x[0].matmul(self.w());
        return {y * static_cast<double>(*y.template data_ptr<float>())};
      });
    });
    CHECK_THROWS_WITH(m.run.forward(one_input()), Contains("directly"));
  }
  SECTION("a scalar") {
    auto o = testing::quick();
    o.verify = 100;
    pair_of_modules m(
        [] {
          return with({square()},
                      [](auto& self, const tensor_list& x) -> tensor_list { return {x[0].matmul(self.w()) * self.scalar}; });
        },
        o);
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
    m.plain->scalar = m.planned->scalar = 2;
    CHECK_THROWS_AS(m.run.forward(one_input()), rt::not_equal);
    m.run.invalidate();
    for (int k = 3; k < 6; ++k) m.step(k, one_input);
  }
  SECTION("an activation that the module keeps") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        self.member = x[0].matmul(self.w()).detach();
        return {self.member * self.w()[0]};
      });
    });
    CHECK_THROWS_WITH(m.run.forward(one_input()), Contains("keeps a tensor"));
  }
}

TEST_CASE("verify compares outputs, buffers, generator and gradients, and changes none of them") {
  auto o = testing::quick();
  o.verify = 3;
  pair_of_modules m(
      [] {
        auto made = with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
          return {at::batch_norm(::torch::dropout(x[0].matmul(self.w()), 0.5, true), {}, {}, self.named_buffers()["mean"],
                                 self.named_buffers()["var"], true, 0.1, 1e-5, false)
                      .tanh()};
        });
        made->register_buffer("mean", ::torch::zeros({6}));
        made->register_buffer("var", ::torch::ones({6}));
        return made;
      },
      o);
  for (int k = 0; k < 5; ++k) m.step(k, [] { return tensor_list{::torch::randn({4, 6}).requires_grad_()}; });
}

TEST_CASE("a plain forward that fails beside a planned step leaves everything as it was") {
  auto o = testing::quick();
  o.verify = 100;
  pair_of_modules m(
      [] {
        auto made = with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
          const auto y = ::torch::dropout(x[0].matmul(self.w()), 0.5, true);
          {
            at::NoGradGuard no_grad;
            self.named_buffers()["sum"].add_(1);
          }
          if (self.scalar < 0) throw std::runtime_error("negative");
          return {y.tanh()};
        });
        made->register_buffer("sum", ::torch::zeros({1}));
        return made;
      },
      o);
  for (int k = 0; k < 2; ++k) m.step(k, one_input);
  m.planned->scalar = -1;
  const auto before = rt::generator_state::now();
  CHECK_THROWS_WITH(m.run.forward({::torch::zeros({4, 6})}), Contains("negative"));
  CHECK(rt::generator_state::now() == before);
  CHECK(m.planned->named_buffers()["sum"].item<float>() == 2);
  m.planned->scalar = 1;
  for (int k = 2; k < 4; ++k) m.step(k, one_input);
}

TEST_CASE("autocast: on, off in a region, beside plain calls, and not around the backward") {
  struct autocast {
    explicit autocast(bool on) : before(at::autocast::is_autocast_enabled(at::kCPU)) {
      at::autocast::set_autocast_enabled(at::kCPU, on);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::increment_nesting();
    }
    ~autocast() {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, before);
    }
    bool before;
  };
  const auto make = [] {
    return with({square(), square()}, [](auto& self, const tensor_list& x) -> tensor_list {
      auto y = x[0].matmul(self.w(0));
      {
        autocast off(false);
        y = y.to(at::kFloat).matmul(self.w(1));
      }
      return {y.tanh().matmul(self.w(0))};
    });
  };
  pair_of_modules m(make);
  const auto cast_loss = [](const tensor_list& out, const tensor_list&) { return out[0].to(at::kFloat).sum(); };
  {
    for (int k = 0; k < 3; ++k) {
      tensor_list in[2], out[2];
      for (int which = 0; which < 2; ++which) {
        ::torch::manual_seed(static_cast<std::uint64_t>(k));
        in[which] = one_input();
        {
          autocast on(true);
          if (k == 1) m.plain->forward(in[which]), m.planned->forward(in[which]);  // casts are in the cache
          if (k == 1) at::autocast::clear_cache();
          out[which] = which == 0 ? m.plain->forward(in[which]) : m.run.forward(in[which]);
          if (k == 2) CHECK(same_bits(m.planned->forward(in[which])[0], out[which][0]));  // the plain module still works
        }
        cast_loss(out[which], in[which]).backward();
      }
      CHECK(same_bits(out[0][0], out[1][0]));
      for (std::size_t i = 0; i < 2; ++i) CHECK(same_bits(m.plain->w(i).grad(), m.planned->w(i).grad()));
    }
    m.zero_grad();
  }
  for (int k = 0; k < 2; ++k) m.step(k, one_input);  // without
  autocast on(true);
  auto loss = m.run.forward(one_input())[0].to(at::kFloat).sum();
  CHECK_THROWS_WITH(loss.backward(), Contains("autocast"));
}

TEST_CASE("other shapes do not keep the memory of the last ones") {
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
    m.run.forward({::torch::randn({batch, 64})})[0].sum().backward();
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

TEST_CASE("memory that an operator keeps, or another allocator takes over, is noticed") {
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

TEST_CASE("gradients are added to those that are there as soon as they are complete") {
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
  SECTION("in the memory of one set") {
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
    m.step(5, input, [&](const tensor_list& out, const tensor_list&) {                    // gradients go between the halves
      (m.turn == 0 ? m.plain : m.planned)->zero_grad();
      return (out[0] * out[0]).sum() + out[1];
    });
    for (int k = 6; k < 8; ++k) m.step(k, input, both);
    m.step(8, input, [](const tensor_list& out, const tensor_list&) {
      out[1].backward({}, true);
      return Tensor();
    });
    m.step(9, input, [&](const tensor_list& out, const tensor_list&) {  // not for `.grad`
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

TEST_CASE("gradients are None where the used outputs do not lead") {
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

TEST_CASE("the generator, set and read by the module in any way") {
  auto generator = at::detail::getDefaultCPUGenerator();
  SECTION("linked draws of different length") {
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
  SECTION("a seed of its own") {
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
  SECTION("left where the forward found it") {
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
  SECTION("a throw in a recomputed draw") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        return {::torch::dropout(x[0].matmul(self.w()), 0.5, true)};
      });
    });
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
  }
}

TEST_CASE("foreign memory, undefined inputs, operators that refuse zeros, a backward within the forward") {
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
  SECTION("a backward of its own") {
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

TEST_CASE("probes: outputs that need no gradient") {
  pair_of_modules m([] {
    return std::make_shared<any_module>(std::initializer_list<Tensor>{::torch::rand({3}), ::torch::rand({3})},
                                        [](any_module& self, const tensor_list& x) -> tensor_list {
                                          return {self.w(1).requires_grad() ? self.w(1) * x[0] : ::torch::rand({3}) * x[0]};
                                        });
  });
  auto nothing = [](const tensor_list& out, const tensor_list&) { return out[0].requires_grad() ? out[0].sum() : Tensor(); };
  auto inputs = [] { return tensor_list{::torch::rand({3})}; };
  for (int i = 0; i < 3; ++i) m.step(i, inputs, nothing);
  for (auto* x : {&m.plain, &m.planned}) (*x)->weights[1].set_requires_grad(false);
  for (int i = 0; i < 3; ++i) m.step(i, inputs, nothing);
  for (auto* x : {&m.plain, &m.planned}) (*x)->weights[1].set_requires_grad(true);
  for (int i = 0; i < 3; ++i) m.step(i, inputs, nothing);
}

TEST_CASE("probes: a forward under autocast that runs once more after it") {
  pair_of_modules m([] {
    return std::make_shared<any_module>(std::initializer_list<Tensor>{::torch::rand({8, 8}), ::torch::rand({8, 8})},
                                        [](any_module& self, const tensor_list& x) -> tensor_list {
                                          const auto y = x[0].matmul(self.w()).matmul(self.w(1));
                                          return {y.to(at::kFloat).sin().sum(), y};
                                        });
  });
  for (int i = 0; i < 4; ++i) {
    m.zero_grad();
    m.step(
        i,
        [] {
          at::autocast::set_autocast_enabled(at::kCPU, true);
          return tensor_list{::torch::rand({6, 8})};
        },
        [&](const tensor_list& out, const tensor_list&) {
          at::autocast::set_autocast_enabled(at::kCPU, false);
          return i < 2 ? out[0] : out[1].to(at::kFloat).square().sum();
        });
  }
}

TEST_CASE("probes: dropout in attention under autocast") {
  pair_of_modules m([] {
    return std::make_shared<any_module>(
        std::initializer_list<Tensor>{::torch::rand({2, 2, 6, 4})}, [](any_module& self, const tensor_list& x) -> tensor_list {
          const auto q = (self.w() * x[0]).to(at::kBFloat16);
          return {at::scaled_dot_product_attention(q, q * 2, q * 3, {}, 0.1).to(at::kFloat).square().sum()};
        });
  });
  for (int i = 0; i < 3; ++i)
    m.step(
        i,
        [] {
          at::autocast::set_autocast_enabled(at::kCPU, true);
          return tensor_list{::torch::rand({2, 2, 6, 4})};
        },
        [](const tensor_list& out, const tensor_list&) {
          at::autocast::set_autocast_enabled(at::kCPU, false);
          return out[0];
        });
}

TEST_CASE("probes: running statistics of a forward that runs once more") {
  pair_of_modules m([] {
    auto made = std::make_shared<any_module>(
        std::initializer_list<Tensor>{::torch::rand({4})}, [](any_module& self, const tensor_list& x) -> tensor_list {
          const auto b = self.named_buffers();
          const auto y = at::batch_norm(x[0] * self.w(), {}, {}, b["mean"], b["variance"], true, 0.1, 1e-5, false);
          return {y.sin().sum(), y};
        });
    made->register_buffer("mean", ::torch::zeros({4}));
    made->register_buffer("variance", ::torch::ones({4}));
    return made;
  });
  for (int i = 0; i < 4; ++i) {
    m.zero_grad();
    m.step(
        i,
        [] {
          return tensor_list{::torch::rand({6, 4})};
        },
        [&](const tensor_list& out, const tensor_list&) { return i < 2 ? out[0] : out[1].square().sum(); });
  }
}

TEST_CASE("probes: the graph leads to what an output depends on, and to nothing else") {
  pair_of_modules m([] {
    return with({square(), square(), square()}, [](any_module& self, const tensor_list& x) -> tensor_list {
      const auto y = x[0].matmul(self.w()).sin();
      return {y.exp().sum(), y.matmul(self.w(1)).tanh()};
    });
  });
  auto inputs = [] {
    auto in = tensor_list{one_input()[0], one_input()[0]};
    for (auto& t : in) t.requires_grad_();
    return in;
  };
  for (int i = 0; i < 6; ++i) {
    if (i == 4) m.zero_grad();
    m.step(i, inputs, [&](const tensor_list& out, const tensor_list& in) {
      if (m.turn == 1) {
        std::vector<const ::torch::autograd::Node*> ends;
        const auto step = out[0].grad_fn()->next_edge(0).function;  // behind the output
        for (const auto& edge : step->next_edges()) ends.push_back(edge.function.get());
        const auto leads_to = [&](const Tensor& t) {
          return std::count(ends.begin(), ends.end(), ::torch::autograd::impl::gradient_edge(t).function.get()) == 1;
        };
        CHECK(leads_to(m.planned->w(0)));
        CHECK(leads_to(m.planned->w(1)));  // also where this loss does not use its output
        CHECK_FALSE(leads_to(m.planned->w(2)));
        CHECK(leads_to(in[0]));
        CHECK_FALSE(leads_to(in[1]));
        CHECK_THROWS_WITH(::torch::autograd::grad({out[0]}, {m.planned->w(2)}, {}, true), Contains("not have been used"));
      }
      return i % 4 < 2 ? out[0] : out[1].square().sum();
    });
    CHECK(m.planned->w().grad().defined());
    CHECK(m.planned->w(1).grad().defined() == (i == 2 || i == 3));
    CHECK_FALSE(m.planned->w(2).grad().defined());
  }
}

namespace {

/// Computes its values once more in the backward, from the same state of the generator, as `torch.utils.checkpoint` does.
struct recomputing : ::torch::autograd::Function<recomputing> {
  static std::pair<Tensor, Tensor> values(const Tensor& x) {
    const auto e = x.exp();
    return {e, ::torch::rand_like(e).add_(1)};
  }
  static Tensor forward(::torch::autograd::AutogradContext* ctx, const Tensor& x, bool other_draw) {
    ctx->save_for_backward({x, at::detail::getDefaultCPUGenerator().get_state()});
    ctx->saved_data["other"] = other_draw;
    const auto [e, noise] = values(x);
    return e * noise;
  }
  static tensor_list backward(::torch::autograd::AutogradContext* ctx, const tensor_list& grads) {
    auto generator = at::detail::getDefaultCPUGenerator();
    const auto saved = ctx->get_saved_variables();
    const auto now = generator.get_state();
    generator.set_state(saved[1]);
    if (ctx->saved_data["other"].toBool()) ::torch::rand({1});
    const auto [e, noise] = values(saved[0]);
    const auto after = ::torch::rand({6});
    generator.set_state(now);
    return {grads[0] * e * noise * after, {}};
  }
};

}  // namespace

TEST_CASE("probes: what a backward computes as the forward did is one with it") {
  for (const bool other : {false, true}) {
    INFO("another draw " << other);
    pair_of_modules m([other] {
      return with({square(), square()}, [other](auto& self, const tensor_list& x) -> tensor_list {
        const auto y = recomputing::apply(x[0].matmul(self.w()), other);
        return {recomputing::apply(y.matmul(self.w(1)).tanh(), other) * ::torch::rand({6})};
      });
    });
    for (int k = 0; k < 3; ++k) m.step(k, one_input);
    std::map<std::string, int> count;
    for (const auto& o : m.run.planning_problem().operations()) {
      std::istringstream names(o.name);
      for (std::string name; std::getline(names, name, '+');) ++count[name];
    }
    CHECK(count["aten::exp"] == 2);
    CHECK(count["aten::rand_like"] + count["aten::uniform_"] + count["aten::rand"] + count["aten::empty_strided"] +
              count["aten::empty"] ==
          (other ? 9 : 5));
  }
}

TEST_CASE("probes: modules on other devices are refused") {
  const auto module = with({::torch::empty({4, 4}, at::kMeta)},
                           [](auto& self, const tensor_list& x) -> tensor_list { return {x[0].matmul(self.w())}; });
  testing::runner run(
      module, [module](const tensor_list& x) { return module->forward(x); }, testing::quick());
  CHECK_THROWS_WITH(run.forward({::torch::empty({2, 4}, at::kMeta)}), Contains("on meta"));
}

namespace {

/// `bernoulli_` draws one number of the generator after the other, as PyTorch's distributions do. Not so on some machines.
bool draws_one_by_one() {
  auto ours = at::detail::createCPUGenerator(3), theirs = at::detail::createCPUGenerator(3);
  const auto drawn = ::torch::empty({100}).bernoulli_(0.4, theirs);
  const at::bernoulli_distribution<double> next(0.4);
  for (int64_t i = 0; i < 100; ++i)
    if (next(at::check_generator<at::CPUGeneratorImpl>(ours)) != drawn[i].item<double>()) return false;
  return true;
}

}  // namespace

TEST_CASE("probes: masks of dropout as bits") {
  const bool bits = draws_one_by_one();
  using change = std::function<Tensor(const Tensor&)>;
  const std::vector<std::pair<std::string, change>> uses = {
      {"plain", [](const Tensor& y) { return ::torch::dropout(y, 0.3, true); }},
      {"in place",
       [](const Tensor& y) {
         auto z = y * 2;
         return ::torch::dropout_(z, 0.3, true);
       }},
      {"transposed", [](const Tensor& y) { return ::torch::dropout(y.t(), 0.1, true).t().contiguous(); }},
      {"channels last",
       [](const Tensor& y) {
         return ::torch::dropout(y.view({1, 3, 17, 11}).contiguous(at::MemoryFormat::ChannelsLast), 0.5, true).reshape({33, 17});
       }},
      {"double", [](const Tensor& y) { return ::torch::dropout(y.to(at::kDouble), 0.2, true).to(at::kFloat); }},
      {"bfloat16", [](const Tensor& y) { return ::torch::dropout(y.to(at::kBFloat16), 0.2, true).to(at::kFloat); }},
      {"half", [](const Tensor& y) { return ::torch::dropout(y.to(at::kHalf), 0.2, true).to(at::kFloat); }},
      {"not divided", [](const Tensor& y) { return y * ::torch::empty_like(y).bernoulli_(0.6); }},
      {"read in another way",
       [](const Tensor& y) {
         const auto mask = ::torch::empty_like(y).bernoulli_(0.6);
         return (y * mask).cumsum(0) + mask.sum(0) + y * mask.t().reshape({33, 17});
       }},
      {"infinite and not a number",
       [](const Tensor& y) { return ::torch::dropout((y - 0.5).log() / (y - 0.2).relu(), 0.3, true); }},
      {"twice", [](const Tensor& y) { return ::torch::dropout(::torch::dropout(y, 0.1, true).sin(), 0.7, true); }}};
  for (const auto& [name, use] : uses) {
    INFO(name);
    auto layers = [use = use] {
      return with({::torch::rand({17, 17}), ::torch::rand({17, 17})}, [use](auto& self, const tensor_list& x) -> tensor_list {
        return {use(use(x[0].matmul(self.w()).sin()).matmul(self.w(1)).cos())};
      });
    };
    for (const double share : {1.0, 0.8}) {
      auto o = testing::quick();
      o.budget.share = share;
      pair_of_modules m(layers, o);
      for (int k = 0; k < 3; ++k) {
        m.zero_grad();
        m.step(k, [] { return tensor_list{::torch::rand({33, 17})}; });
      }
      std::set<std::string> names;
      for (const auto& operation : m.run.planning_problem().operations()) names.insert(operation.name);
      CHECK(names.count("remat::draw") == (bits ? 1 : 0));
      CHECK(names.count("aten::bernoulli_") == (bits ? 0 : 1));
    }
  }
}

TEST_CASE("probes: bits are drawn as bernoulli_ draws them") {
  const auto draw = c10::Dispatcher::singleton().findSchemaOrThrow("remat::draw", "");
  if (!draws_one_by_one()) {
    torch::jit::Stack stack{8, 0.5};
    CHECK_THROWS_WITH(draw.callBoxed(stack), Contains("draws otherwise"));
    return;
  }
  for (const double p : {0.0, 1e-20, 0.1, 0.5, 0.9, 1 - 1e-16, 1.0})
    for (const int64_t n : {0, 1, 7, 8, 9, 311, 312, 313, 624, 1000, 5003}) {
      INFO(n << " at " << p);
      ::torch::manual_seed(static_cast<std::uint64_t>(n));
      ::torch::rand({n % 5});  // begins within a block of the generator, at odd words too
      const auto begin = rt::generator_state::now();
      const auto expected = ::torch::empty({n}).bernoulli_(p);
      const auto after = rt::generator_state::now();
      begin.restore();
      torch::jit::Stack stack{n, p};
      draw.callBoxed(stack);
      CHECK(rt::generator_state::now() == after);
      const auto bits = stack[0].toTensor();
      bool same = bits.numel() == (n + 7) / 8;
      for (int64_t i = 0; i < n && same; ++i)
        same = (expected[i].item<float>() != 0) == ((bits[i / 8].item<uint8_t>() >> (i % 8) & 1) != 0);
      CHECK(same);
    }
}

TEST_CASE("probes: modules and parameters that come later, and modes of parts") {
  const auto part = [] { return with({square()}, [](any_module&, const tensor_list& x) { return x; }); };
  pair_of_modules m([&] {
    auto made = with({square()}, [](any_module& self, const tensor_list& x) -> tensor_list {
      auto y = x[0];
      for (const auto& w : self.parameters(false)) y = y.matmul(w).sin();
      for (const auto& child : self.children())
        y = ::torch::dropout(y.matmul(child->parameters()[0]).sin(), 0.5, child->is_training());
      return {y};
    });
    made->register_module("part", part());
    return made;
  });
  const std::function<void(any_module&)> changes[] = {
      [&](any_module& x) { x.replace_module("part", part()); },
      [&](any_module& x) { x.register_module("another", part()); },
      [&](any_module& x) { x.children()[1]->eval(); },
      [&](any_module& x) { x.register_parameter("late", square()); },
      [&](any_module& x) { x.parameters(false)[0].set_requires_grad(false); },
      [&](any_module& x) { x.unregister_module("part"); },
  };
  int i = 0;
  for (const auto& change : changes) {
    for (int k = 0; k < 3; ++k) m.step(i++, one_input);
    for (const auto& x : {m.plain, m.planned}) {
      ::torch::manual_seed(static_cast<std::uint64_t>(i));
      change(*x);
    }
    m.zero_grad();
  }
  for (int k = 0; k < 3; ++k) m.step(i++, one_input);
}
