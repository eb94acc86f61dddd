// SPDX-License-Identifier: Apache-2.0
// Hostile modules: the autograd graph, dropout masks, modules and parameters that are added later.
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
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>
#include <set>
#include <sstream>

#include "compare.hpp"
#include "default_device.hpp"
#include "pair_of_modules.hpp"
#include "quick.hpp"

using namespace probes_tests;

TEST_CASE("probes: outputs that need no gradient", "[device]") {
  const on_test_device there;
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

TEST_CASE("probes: a forward under autocast that runs a second time outside of autocast", "[device]") {
  const on_test_device there;
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

TEST_CASE("probes: dropout in attention under autocast", "[device]") {
  const on_test_device there;
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

TEST_CASE("probes: running statistics of a forward that runs a second time", "[device]") {
  const on_test_device there;
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

TEST_CASE("probes: the autograd graph of an output leads to its dependencies and nothing else", "[device]") {
  const on_test_device there;
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
        const auto step = out[0].grad_fn()->next_edge(0).function;  // the node behind the output
        for (const auto& edge : step->next_edges()) ends.push_back(edge.function.get());
        const auto leads_to = [&](const Tensor& t) {
          return std::count(ends.begin(), ends.end(), ::torch::autograd::impl::gradient_edge(t).function.get()) == 1;
        };
        CHECK(leads_to(m.planned->w(0)));
        CHECK(leads_to(m.planned->w(1)));  // even if this loss does not use its output
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

/// Recomputes its values in the backward from the same generator state, as `torch.utils.checkpoint` does.
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

TEST_CASE("probes: a recomputation in the backward is merged with the operations of the forward") {
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
    const auto planned = m.run.planned();
    for (const auto& o : planned.problem.operations()) {
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

/// Whether `bernoulli_` draws one number after another from the generator, like PyTorch's distributions. On some machines it does
/// not.
bool draws_one_by_one() {
  auto ours = at::detail::createCPUGenerator(3), theirs = at::detail::createCPUGenerator(3);
  const auto drawn = ::torch::empty({100}).bernoulli_(0.4, theirs);
  const at::bernoulli_distribution<double> next(0.4);
  for (int64_t i = 0; i < 100; ++i)
    if (next(at::check_generator<at::CPUGeneratorImpl>(ours)) != drawn[i].item<double>()) return false;
  return true;
}

}  // namespace

TEST_CASE("probes: dropout masks are kept as bits") {
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
      const auto planned = m.run.planned();
      for (const auto& operation : planned.problem.operations()) names.insert(operation.name);
      CHECK(names.count("remat::draw") == (bits ? 1 : 0));
      CHECK(names.count("aten::bernoulli_") == (bits ? 0 : 1));
    }
  }
}

TEST_CASE("probes: bits are drawn like the numbers of bernoulli_") {
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

TEST_CASE("probes: modules and parameters that are added later, and training modes of parts", "[device]") {
  const on_test_device there;
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
