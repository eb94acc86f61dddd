// SPDX-License-Identifier: Apache-2.0
// Hostile modules: hooks, shared memory, writes, members, autocast in regions.
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/DistributionsHelper.h>

#include <catch2/catch.hpp>
#include <remat/pytorch/memory.hpp>

#include "compare.hpp"
#include "default_device.hpp"
#include "pair_of_modules.hpp"
#include "quick.hpp"

using namespace probes_tests;

TEST_CASE("hooks of parameters fire as in eager mode, even hooks from before the capture", "[device]") {
  const on_test_device there;
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

TEST_CASE("parameters that share memory, and modules that are registered twice", "[device]") {
  const on_test_device there;
  SECTION("parameters in one flat tensor") {
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
    // One parameter moves; the other stays.
    for (auto* x : {&m.plain, &m.planned}) (*x)->weights[1].set_data((*x)->weights[1].detach().clone());
    {
      at::NoGradGuard no_grad;
      for (auto* x : {&m.plain, &m.planned}) (*x)->weights[0].mul_(0.5);
    }
    for (int k = 3; k < 6; ++k) m.step(k, one_input);
  }
  SECTION("a submodule that is registered twice") {
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

TEST_CASE("inputs at any offset of their storage, viewed as another type", "[device]") {
  const on_test_device there;
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
  CHECK_THROWS_AS(m.run.forward({data.slice(0, 3, 27).view({4, 6})}), c10::Error);  // as in eager mode
  CHECK(data.storage().nbytes() == 400);
}

TEST_CASE("a change of a tensor that the backward reads is an error", "[device]") {
  const on_test_device there;
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

TEST_CASE("writes of a step increase versions, and outputs share them", "[device]") {
  const on_test_device there;
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

TEST_CASE("an output that shares the memory of a parameter must not change before the backward", "[device]") {
  const on_test_device there;
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

TEST_CASE("replaced members are noticed", "[device]") {
  const on_test_device there;
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

TEST_CASE("direct reads of memory during a capture are refused, and changed scalars are found by `verify` or need `invalidate`") {
  SECTION("an accessor of an integer input") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        return {x[0].matmul(self.w()) * static_cast<double>(x[1].template accessor<int64_t, 1>()[0])};
      });
    });
    CHECK_THROWS_WITH(m.run.forward({::torch::randn({4, 6}), ::torch::full({1}, 3, ::torch::kLong)}), Contains("directly"));
  }
  SECTION("a data pointer of an activation") {
    pair_of_modules m([] {
      return with({square()}, [](auto& self, const tensor_list& x) -> tensor_list {
        auto y = x[0].matmul(self.w());
        return {y * static_cast<double>(*y.template data_ptr<float>())};
      });
    });
    CHECK_THROWS_WITH(m.run.forward(one_input()), Contains("directly"));
  }
  SECTION("a scalar member") {
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

TEST_CASE("verify compares outputs, buffers, generator and gradients, and changes none of them", "[device]") {
  const on_test_device there;
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

TEST_CASE("a failing plain forward beside a planned step has no side effects", "[device]") {
  const on_test_device there;
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

TEST_CASE("autocast: on, off in a region, beside plain calls, and not around the backward", "[device]") {
  const on_test_device there;
  struct autocast {
    explicit autocast(bool on) : before(at::autocast::is_autocast_enabled(test_device().type())) {
      at::autocast::set_autocast_enabled(test_device().type(), on);
      at::autocast::set_autocast_dtype(test_device().type(), at::kBFloat16);
      at::autocast::increment_nesting();
    }
    ~autocast() {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(test_device().type(), before);
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
          if (k == 1) m.plain->forward(in[which]), m.planned->forward(in[which]);  // fills the cache of casts
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
  for (int k = 0; k < 2; ++k) m.step(k, one_input);  // without autocast
  autocast on(true);
  auto loss = m.run.forward(one_input())[0].to(at::kFloat).sum();
  CHECK_THROWS_WITH(loss.backward(), Contains("autocast"));
}
