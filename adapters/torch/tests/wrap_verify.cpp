// SPDX-License-Identifier: Apache-2.0
// The comparisons of `verify`, and its messages.
#include <torch/torch.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>

#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"
#include "twins.hpp"

using namespace wrap_tests;

namespace {

/// A kernel with other low bits in every call, like a kernel with atomic additions.
at::Tensor noisy_kernel(const at::Tensor& x) {
  static std::atomic<int> calls = 0;
  return x * (1 + 1e-6 * (++calls % 1000));
}
at::Tensor noisy(const at::Tensor& x) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("remat_test::noisy", "").typed<at::Tensor(const at::Tensor&)>();
  return op.call(x);
}
struct noisy_function : ::torch::autograd::Function<noisy_function> {
  static at::Tensor forward(::torch::autograd::AutogradContext*, const at::Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return noisy(x);
  }
  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext*, ::torch::autograd::variable_list g) {
    return {g[0]};
  }
};
at::Tensor noisy_autograd(const at::Tensor& x) { return noisy_function::apply(x); }

/// Multiplies by a number. The backward uses the noisy operator if asked for.
struct scaled_backward : ::torch::autograd::Function<scaled_backward> {
  static at::Tensor forward(::torch::autograd::AutogradContext* c, const at::Tensor& x, double by, bool with_noise) {
    c->saved_data["by"] = by;
    c->saved_data["noise"] = with_noise;
    return x.clone();
  }
  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* c, ::torch::autograd::variable_list g) {
    const auto scaled = g[0] * c->saved_data["by"].toDouble();
    return {c->saved_data["noise"].toBool() ? noisy(scaled) : scaled, {}, {}};
  }
};

TORCH_LIBRARY(remat_test, m) { m.def("noisy(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(remat_test, CompositeExplicitAutograd, m) { m.impl("noisy", &noisy_kernel); }
TORCH_LIBRARY_IMPL(remat_test, Autograd, m) { m.impl("noisy", &noisy_autograd); }

enum class noise { nowhere, forward, backward };

/// Two branches: the first may be noisy, the second never is.
struct branches : ::torch::nn::Module {
  explicit branches(noise w) : where(w) {
    first = register_parameter("first", ::torch::randn({6, 6}));
    second = register_parameter("second", ::torch::randn({6, 6}));
    count = register_buffer("count", ::torch::zeros({1}));
    to(test_device());
  }
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    {
      at::NoGradGuard no_grad;
      count.add_(1);
    }
    auto a = x.matmul(first);
    if (where == noise::forward) a = noisy(a);
    if (where == noise::backward) a = scaled_backward::apply(a, 1, true);
    const auto b = scaled_backward::apply(x.matmul(second), gradient_scale, false);
    return {a.tanh(), ::torch::dropout(b.tanh(), 0.5, true) * scale};
  }
  noise where;
  double scale = 1, gradient_scale = 1;
  at::Tensor first, second, count;
};

/// Trains `branches`, and keeps the log.
struct verified {
  explicit verified(noise where)
      : net(seeded(where)),
        run(
            net, [n = net](const auto& x) { return n->forward(x[0]); }, options()) {}
  static std::shared_ptr<branches> seeded(noise where) {
    ::torch::manual_seed(5);
    return std::make_shared<branches>(where);
  }
  rt::wrap_options options() {
    auto o = testing::quick();
    o.verify = 100;
    o.warn = [this](const std::string& text) { warnings.push_back(text); };
    return o;
  }
  /// One step, planned or plain.
  void step(bool planned = true) {
    ::torch::manual_seed(7);
    const auto x = ::torch::randn({4, 6}).to(test_device());
    const auto out = planned ? run.forward({x}) : net->forward(x);
    ((out[0] * out[0]).sum() + (out[1] * out[1]).sum()).backward();
  }
  std::vector<std::string> warnings;
  std::shared_ptr<branches> net;
  testing::runner run;
};

}  // namespace

TEST_CASE("verify compares results that all plain steps agree on, and names operators whose results vary", "[device]") {
  using Catch::Contains;
  const auto where = GENERATE(noise::nowhere, noise::forward, noise::backward);
  const hardware::option late("late", 20);
  INFO("noise " << static_cast<int>(where));
  verified v(where), plain(where);
  int hooks = 0;
  v.net->first.register_hook([&](const at::Tensor& g) { return ++hooks, g; });
  for (int k = 1; k <= 3; ++k) {
    v.step();
    const auto generator = state_of_test_generator();
    plain.step(false);
    CHECK(same_bits(generator, state_of_test_generator()));
    CHECK(hooks == k);
    CHECK(same_bits(v.net->second.grad(), plain.net->second.grad()));
    CHECK(at::allclose(v.net->first.grad().cpu(), plain.net->first.grad().cpu(), 0.1, 0.1));
    CHECK(same_bits(v.net->count, plain.net->count));
    CHECK(v.net->count._version() == plain.net->count._version());
    if (where == noise::nowhere) {
      CHECK(v.warnings.empty());
      continue;
    }
    REQUIRE(v.warnings.size() == static_cast<std::size_t>(k));
    CHECK_THAT(v.warnings.back(), Contains("come from remat_test::noisy") && !Contains("::noisy,") && !Contains("calls"));
    CHECK_THAT(v.warnings.back(), Contains(". 1 of 2 gradients is not compared: first"));
    CHECK(v.warnings.back().ends_with(": first"));
    const bool output = v.warnings.back().find(". 1 of 3 outputs and buffers is not compared: output 0.") != std::string::npos;
    CHECK(output == (where == noise::forward));
  }
  // The rest of the step is still compared.
  const auto before = v.net->second.grad().clone();
  v.net->gradient_scale = 2;
  CHECK_THROWS_WITH(v.step(), Contains("the gradient of second"));
  CHECK(same_bits(v.net->second.grad(), before));
  v.net->scale = 2;
  CHECK_THROWS_WITH(v.step(), Contains("output 1"));
  v.run.invalidate();
  CHECK_NOTHROW(v.step());
  CHECK(hardware::races() == "");
}

TEST_CASE("verify needs no second plain step if an input has been written since", "[device]") {
  verified v(noise::forward);
  v.net->first.requires_grad_(false);
  v.net->second.requires_grad_(false);
  auto x = ::torch::randn({4, 6}).to(test_device()).requires_grad_();
  const auto out = v.run.forward({x});
  x.unsafeGetTensorImpl()->bump_version();  // no backward of a product with a constant reads it
  (out[0].sum() + out[1].sum()).backward();
  REQUIRE(v.warnings.size() == 1);
  CHECK_THAT(v.warnings[0],
             Catch::Contains("an operator that is not known") && Catch::Contains("1 of 1 gradients is not compared: input 0"));
}
