// SPDX-License-Identifier: Apache-2.0
// Training with a wrapped module equals eager mode: results, gradients, buffers, generator state.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>
#include <sstream>
#include <stdexcept>

#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"
#include "twins.hpp"

using namespace wrap_tests;

TEST_CASE("training equals eager mode at every step, within the budget", "[device]") {
  const hardware::option late("late", 20);
  for (const auto which : models::trained())
    for (const char* share : {"100% of activations", "50% of activations"}) {
      twins t(which);
      INFO(t.plain.name << " at " << share);
      auto runner = std::make_unique<testing::runner>(t.planned.module, t.planned.forward, testing::quick(share));
      try {
        runner->prepare(t.planned.inputs);
      } catch (const rt::over_budget& e) {  // in small models, gradients alone are more than half: the suggested budget must work
        REQUIRE(std::string(share) == "50% of activations");
        REQUIRE(e.smallest.has_value());
        CHECK(*e.smallest >= e.bound);
        CHECK(*e.smallest > e.asked);
        runner->set_budget(*e.smallest);
        runner->prepare(t.planned.inputs);
        runner->set_budget(*e.smallest + *e.smallest / 4);  // searches for other uses of the outputs may find less
        runner->prepare(t.planned.inputs);
      }
      auto& run = *runner;
      std::vector<at::Tensor> given;  // gradients of the outputs that have one
      for (const auto& o : t.plain.forward(t.plain.inputs))
        if (o.requires_grad()) given.push_back(::torch::randn_like(o));
      auto backward = [&](std::vector<at::Tensor> outputs) {
        std::erase_if(outputs, [](const auto& o) { return !o.requires_grad(); });
        ::torch::autograd::backward(outputs, given);
      };
      copy_buffers(*t.plain.module, *t.planned.module);
      for (int step = 0; step < 20; ++step) {
        INFO("step " << step);
        for (auto* s : {&t.plain, &t.planned}) {
          s->module->zero_grad();
          for (auto& in : s->inputs) in.mutable_grad().reset();
        }
        ::torch::manual_seed(static_cast<std::uint64_t>(step));
        auto expected = t.plain.forward(t.plain.inputs);
        backward(expected);
        const auto generator = state_of_test_generator();

        ::torch::manual_seed(static_cast<std::uint64_t>(step));
        const rt::meter counting;
        auto& device = rt::device_of(test_device());
        const auto before = device.use().live - run.report().arena;  // another plan may exist by now, with its own arena
        device.reset_peak();
        {
          auto outputs = run.forward(t.planned.inputs);
          check_same(expected, outputs);
          backward(outputs);
        }
        const auto peak = device.use().peak;
        CHECK(same_bits(state_of_test_generator(), generator));
        const auto report = run.report();
        CHECK(report.total() <= report.budget);
        const auto copies = report.buffers / 2;  // copies of the buffers for a second forward
        CHECK(peak - before <= report.arena + report.outputs + copies);
        check_same(grads(*t.plain.module), grads(*t.planned.module));
        check_same(t.plain.module->buffers(), t.planned.module->buffers());
        for (std::size_t i = 0; i < t.plain.inputs.size(); ++i)
          CHECK(same_bits(t.plain.inputs[i].grad(), t.planned.inputs[i].grad()));
        sgd(*t.plain.module);
        sgd(*t.planned.module);
        REQUIRE(hardware::races() == "");
      }
      CHECK(run.report().unplanned_allocations == 0);
    }
}

TEST_CASE("a wrapped module behaves like the module") {
  ::torch::manual_seed(1);
  auto net = std::make_shared<models::gpt_net>(2, 32, 50, 16, 0.1, true, false);
  auto ids = ::torch::randint(50, {2, 16}), target = ::torch::randint(50, {2, 16});
  auto w = rt::wrap(net, std::tuple(ids, target), testing::quick());
  const auto names = net->named_parameters(), wrapped_names = w->named_parameters();
  REQUIRE(names.size() == wrapped_names.size());
  for (const auto& n : names) CHECK(wrapped_names[n.key()].is_same(n.value()));
  w->forward(ids, target).backward();
  for (const auto& p : net->parameters()) CHECK(p.grad().defined());
  CHECK(w->report().text().find("arena") != std::string::npos);

  SECTION("save writes an archive of the same size") {
    std::stringstream a, b;
    ::torch::serialize::OutputArchive x, y;
    net->save(x);
    w->save(y);
    x.save_to(a);
    y.save_to(b);
    CHECK(a.str().size() == b.str().size());
  }
  SECTION("no_grad and eval") {
    w->eval();
    CHECK_FALSE(net->is_training());
    at::NoGradGuard no_grad;
    ::torch::manual_seed(3);
    const auto expected = net->forward(ids, target);
    ::torch::manual_seed(3);
    CHECK(same_bits(w->forward(ids, target), expected));
  }
}

namespace {

struct pair_of {
  at::Tensor sum, product;
};
struct two_ways : ::torch::nn::Module {
  two_ways() : weight_(register_parameter("weight", ::torch::randn({4}))) {}
  pair_of forward(const at::Tensor& x, const at::Tensor& y) { return {(x + y) * weight_, x * y * weight_}; }

 private:
  at::Tensor weight_;
};

}  // namespace

template <>
struct remat::pytorch::output_trait<pair_of> {
  static std::vector<at::Tensor> list(const pair_of& p) { return {p.sum, p.product}; }
  static pair_of make(std::vector<at::Tensor> list) { return {list.at(0), list.at(1)}; }
};

TEST_CASE("results have the type of the module: a tensor, a tuple, a struct") {
  ::torch::manual_seed(1);
  auto x = ::torch::rand({2, 4}), y = ::torch::rand({2, 4});
  ::torch::nn::Linear linear(4, 3);
  CHECK(same_bits(rt::wrap(linear, x, testing::quick())->forward(x), linear(x)));
  ::torch::nn::GRU gru(4, 5);
  auto sequence = ::torch::rand({3, 2, 4});
  const auto [out, last] = rt::wrap(gru, sequence, testing::quick())->forward(sequence);
  const auto [plain_out, plain_last] = gru(sequence);
  CHECK(same_bits(out, plain_out));
  CHECK(same_bits(last, plain_last));
  auto both = std::make_shared<two_ways>();
  auto w = rt::wrap(both, std::tuple(x, y), testing::quick());
  const auto p = w->forward(x, y), expected = both->forward(x, y);
  CHECK(same_bits(p.sum, expected.sum));
  CHECK(same_bits(p.product, expected.product));
  (p.sum.sum() + p.product.sum()).backward();
  const auto grad = both->parameters()[0].grad().clone();
  both->zero_grad();
  (expected.sum.sum() + expected.product.sum()).backward();
  CHECK(same_bits(grad, both->parameters()[0].grad()));
}

TEST_CASE("gradients accumulate over two micro-batches, in any order of zero_grad") {
  auto make = [] {
    ::torch::manual_seed(23);
    return models::gpt(3, 4, 32, 64);
  };
  const auto plain = make(), planned = make();
  std::optional<testing::runner> run(std::in_place, planned.module, planned.forward, testing::quick());
  const bool tight = GENERATE(false, true);
  if (tight) {  // enough for a step without gradients only: with gradients, the plan must recompute
    run->prepare(planned.inputs);
    const auto total = run->report().total();
    run.emplace(planned.module, planned.forward, testing::quick(total));
  }
  std::size_t recomputed = 0;
  for (int step = 0; step < 6; ++step) {
    INFO("step " << step);
    for (const auto* s : {&plain, &planned}) {
      ::torch::manual_seed(static_cast<std::uint64_t>(step));
      if (step < 3) s->module->zero_grad(step != 1);
      for (int k = 0; k < (step < 3 ? 2 : 1); ++k) {
        auto outputs = s == &plain ? s->forward(s->inputs) : run->forward(s->inputs);
        if (step >= 3) s->module->zero_grad();
        models::loss_of(outputs).backward();
      }
      sgd(*s->module);
    }
    check_same(grads(*plain.module), grads(*planned.module));
    const auto report = run->report();
    recomputed = std::max(recomputed, report.recomputed);
    CHECK(report.total() <= report.budget);
  }
  CHECK(run->report().unplanned_allocations == 0);
  CHECK((recomputed > 0) == tight);
}

TEST_CASE("hooks that step parameters and free their gradients train as in eager mode") {
  struct hook final : ::torch::autograd::PostAccumulateGradHook {
    void operator()(const at::Tensor& p) override {
      at::NoGradGuard no_grad;
      at::Tensor(p).add_(p.grad(), -0.05);
      p.mutable_grad().reset();
      ++calls;
    }
    static int& count() {
      static int n = 0;
      return n;
    }
    int& calls = count();
  };
  std::size_t smaller = 0;
  const auto models = models::all().size();
  for (std::size_t which = 0; which < models; ++which)
    for (const bool expected : {false, true}) {
      twins t(which);
      INFO(t.plain.name);
      for (const auto* s : {&t.plain, &t.planned})
        for (auto& p : s->module->parameters())
          if (p.requires_grad()) ::torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<hook>());
      auto options = testing::quick("100%");
      options.gradients_leave = expected;
      testing::runner run(t.planned.module, t.planned.forward, options);
      copy_buffers(*t.plain.module, *t.planned.module);
      int calls[2];
      for (int step = 0; step < 6; ++step) {
        std::vector<at::Tensor> results[2];
        for (const int planned : {0, 1}) {
          const auto& s = planned ? t.planned : t.plain;
          ::torch::manual_seed(static_cast<std::uint64_t>(step));
          hook::count() = 0;
          results[planned] = planned ? run.forward(s.inputs) : s.forward(s.inputs);
          models::loss_of(results[planned]).backward();
          calls[planned] = hook::count();
        }
        check_same(results[0], results[1]);
        CHECK(calls[0] == calls[1]);
        check_same(t.plain.module->parameters(), t.planned.module->parameters());
        check_same(t.plain.module->buffers(), t.planned.module->buffers());
      }
      const auto leave = run.report().planned_for.find("gradients leave") != std::string::npos;
      const auto large = [](const auto& p) {
        return p.requires_grad() && p.nbytes() >= static_cast<std::size_t>(rt::min_early_gradient_bytes);
      };
      const auto parameters = t.planned.module->parameters();
      if (std::any_of(parameters.begin(), parameters.end(), large)) smaller += leave;
    }
  CHECK(smaller > 2);
}

TEST_CASE("gradients that a failing hook leaves are complete, whatever runs next") {
  twins t(3);
  std::vector<at::Tensor> seen;
  std::size_t fails_at = 0;  // 0: never
  struct hook final : ::torch::autograd::PostAccumulateGradHook {
    hook(std::vector<at::Tensor>& list, const std::size_t& when) : all(list), failing(when) {}
    void operator()(const at::Tensor& p) override {
      all.push_back(p);
      if (failing == 0) p.mutable_grad().reset();
      if (all.size() == failing) throw std::runtime_error("the hook fails");
    }
    std::vector<at::Tensor>& all;
    const std::size_t& failing;
  };
  const auto wanted = t.planned.module->parameters();
  for (const auto& p : wanted) ::torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<hook>(seen, fails_at));
  auto options = testing::quick("100%");
  options.gradients_leave = true;
  testing::runner run(t.planned.module, t.planned.forward, options);
  const auto loss = [&](bool planned) {
    ::torch::manual_seed(1);
    return models::loss_of(planned ? run.forward(t.planned.inputs) : t.plain.forward(t.plain.inputs));
  };
  loss(false).backward();
  const auto expected = grads(*t.plain.module);
  loss(true).backward();
  CHECK(run.report().planned_for.find("gradients leave") != std::string::npos);
  for (const std::size_t when : {1, 4, 10}) {
    t.planned.module->zero_grad();
    seen.clear();
    fails_at = when;
    CHECK_THROWS_WITH(loss(true).backward(), "the hook fails");
    CHECK(seen.size() == when);
    if (when == 4)
      static_cast<void>(loss(true));
    else
      run.release();
    for (const auto& p : seen)
      for (std::size_t i = 0; i < wanted.size(); ++i)
        if (wanted[i].is_same(p)) CHECK(same_bits(p.grad(), expected[i]));
    fails_at = 0;
  }
}

TEST_CASE("a thousand iterations neither drift nor leak") {
  const rt::meter counting;
  for (const std::size_t which : {2, 3}) {
    twins t(which);
    INFO(t.plain.name);
    testing::runner run(t.planned.module, t.planned.forward, testing::quick("90%"));
    bytes_t live = 0;
    for (int step = 0; step < 1000; ++step) {
      for (auto* s : {&t.plain, &t.planned}) {
        ::torch::manual_seed(static_cast<std::uint64_t>(step));
        s->module->zero_grad();
        models::loss_of(s == &t.plain ? s->forward(s->inputs) : run.forward(s->inputs)).backward();
        sgd(*s->module);
      }
      if (step == 10) live = rt::meter::live();
    }
    CHECK(rt::meter::live() == live);
    CHECK(run.reports().size() <= 2);
    CHECK(run.report().unplanned_allocations == 0);
    check_same(t.plain.module->parameters(), t.planned.module->parameters());
    check_same(t.plain.module->buffers(), t.planned.module->buffers());
    check_same(grads(*t.plain.module), grads(*t.planned.module));
  }
}
