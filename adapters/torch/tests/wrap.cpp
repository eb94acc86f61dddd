// SPDX-License-Identifier: Apache-2.0
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/torch.h>

#include <ATen/Parallel.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>
#include <remat/solver/min_cut.hpp>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"

using namespace remat;
namespace rt = remat::pytorch;

namespace {

void check_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("tensor " << i);
    CHECK(same_bits(a[i], b[i]));
  }
}

std::vector<at::Tensor> grads(const ::torch::nn::Module& m) {
  std::vector<at::Tensor> list;
  for (const auto& p : m.parameters()) list.push_back(p.grad());
  return list;
}

/// A model twice, with equal parameters.
struct twins {
  models::sample plain, planned;
  explicit twins(std::size_t which) {
    ::torch::manual_seed(17);
    plain = models::all().at(which);
    ::torch::manual_seed(17);
    planned = models::all().at(which);
  }
};

void copy_buffers(::torch::nn::Module& to, const ::torch::nn::Module& from) {
  at::NoGradGuard no_grad;
  for (const auto& b : from.named_buffers()) to.named_buffers()[b.key()].copy_(b.value());
}

void sgd(::torch::nn::Module& m) {
  at::NoGradGuard no_grad;
  for (auto& p : m.parameters())
    if (p.grad().defined()) p.add_(p.grad(), -0.05);
}

}  // namespace

TEST_CASE("training equals eager mode at every step, within the budget", "[device]") {
  const hardware::option late("late", 20);
  for (const auto which : models::trained())
    for (const char* share : {"100% of activations", "50% of activations"}) {
      twins t(which);
      INFO(t.plain.name << " at " << share);
      auto runner = std::make_unique<testing::runner>(t.planned.module, t.planned.forward, testing::quick(share));
      try {
        runner->prepare(t.planned.inputs);
      } catch (const rt::over_budget& e) {  // gradients alone are more than half in small models: what is said to do must do
        REQUIRE(std::string(share) == "50% of activations");
        REQUIRE(e.smallest.has_value());
        CHECK(*e.smallest >= e.bound);
        CHECK(*e.smallest > e.asked);
        runner->set_budget(*e.smallest);
        runner->prepare(t.planned.inputs);
        runner->set_budget(*e.smallest + *e.smallest / 4);  // searches for other uses of the outputs may end less well
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
        const auto before = device.use().live - run.report().arena;  // another plan may be there by now, with an arena of its own
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
        const auto copies = report.buffers / 2;  // of what a second forward would begin with
        CHECK(peak - before <= report.arena + report.outputs + copies);
        check_same(grads(*t.plain.module), grads(*t.planned.module));
        check_same(t.plain.module->buffers(), t.planned.module->buffers());
        for (std::size_t i = 0; i < t.plain.inputs.size(); ++i)
          CHECK(same_bits(t.plain.inputs[i].grad(), t.planned.inputs[i].grad()));
        sgd(*t.plain.module);
        sgd(*t.planned.module);
        REQUIRE(hardware::races() == "");
      }
      CHECK(run.report().unplanned == 0);
    }
}

TEST_CASE("a wrapped module is the module") {
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

  SECTION("save and load") {
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

TEST_CASE("results are those of the module: a tensor, a tuple, a struct") {
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
  if (tight) {  // just enough for a step without gradients: with them, there must be recomputation
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
  CHECK(run->report().unplanned == 0);
  CHECK((recomputed > 0) == tight);
}

TEST_CASE("gradients leave to hooks that step and free them") {
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
      int told[2];
      for (int step = 0; step < 6; ++step) {
        std::vector<at::Tensor> results[2];
        for (const int planned : {0, 1}) {
          const auto& s = planned ? t.planned : t.plain;
          ::torch::manual_seed(static_cast<std::uint64_t>(step));
          hook::count() = 0;
          results[planned] = planned ? run.forward(s.inputs) : s.forward(s.inputs);
          models::loss_of(results[planned]).backward();
          told[planned] = hook::count();
        }
        check_same(results[0], results[1]);
        CHECK(told[0] == told[1]);
        check_same(t.plain.module->parameters(), t.planned.module->parameters());
        check_same(t.plain.module->buffers(), t.planned.module->buffers());
      }
      const auto leave = run.report().planned_for.find("gradients leave") != std::string::npos;
      const auto large = [](const auto& p) {
        return p.requires_grad() && p.nbytes() >= static_cast<std::size_t>(rt::least_given);
      };
      const auto parameters = t.planned.module->parameters();
      if (std::any_of(parameters.begin(), parameters.end(), large)) smaller += leave;
    }
  CHECK(smaller > 2);
}

TEST_CASE("gradients that a failing hook leaves are whole, whatever runs next") {
  twins t(3);
  std::vector<at::Tensor> told;
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
  for (const auto& p : wanted) ::torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<hook>(told, fails_at));
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
    told.clear();
    fails_at = when;
    CHECK_THROWS_WITH(loss(true).backward(), "the hook fails");
    CHECK(told.size() == when);
    if (when == 4)
      static_cast<void>(loss(true));
    else
      run.release();
    for (const auto& p : told)
      for (std::size_t i = 0; i < wanted.size(); ++i)
        if (wanted[i].is_same(p)) CHECK(same_bits(p.grad(), expected[i]));
    fails_at = 0;
  }
}

TEST_CASE("a thousand iterations neither drift nor grow") {
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
    CHECK(run.report().unplanned == 0);
    check_same(t.plain.module->parameters(), t.planned.module->parameters());
    check_same(t.plain.module->buffers(), t.planned.module->buffers());
    check_same(grads(*t.plain.module), grads(*t.planned.module));
  }
}

TEST_CASE("two forwards before a backward, each with its own memory") {
  twins t(3);
  for (const char* share : {"100%", "90%"}) {
    testing::runner run(t.planned.module, t.planned.forward, testing::quick(share));
    for (auto* s : {&t.plain, &t.planned}) {
      s->module->zero_grad();
      ::torch::manual_seed(4);
      auto a = s == &t.plain ? s->forward(s->inputs) : run.forward(s->inputs);
      const auto one = s == &t.plain ? rt::report() : run.report();
      auto b = s == &t.plain ? s->forward(s->inputs) : run.forward(s->inputs);
      if (s == &t.planned) {  // the budget is of both, which share what only one needs at a time
        CHECK(run.report().in_flight == 2);
        CHECK(run.report().left > one.left);
      }
      (2 * models::loss_of(b) + models::loss_of(a)).backward();
    }
    check_same(grads(*t.plain.module), grads(*t.planned.module));
  }

  SECTION("in a budget in bytes") {
    testing::runner once(t.planned.module, t.planned.forward, testing::quick());
    once.prepare(t.planned.inputs);
    const auto one = once.report();
    testing::runner run(t.planned.module, t.planned.forward, testing::quick(one.held() + 4 * (one.total() - one.held())));
    for (int step = 0; step < 3; ++step) {
      t.planned.module->zero_grad();
      auto a = run.forward(t.planned.inputs), b = run.forward(t.planned.inputs);
      (models::loss_of(a) + models::loss_of(b)).backward();
      CHECK(run.report().in_flight == 2);
      CHECK(run.report().total() <= run.report().budget);
    }
  }

  SECTION("or an error if no plan for both is known, once that is learned") {
    bytes_t least = 0;  // for one
    try {
      testing::runner(t.planned.module, t.planned.forward, testing::quick(bytes_t{1})).prepare(t.planned.inputs);
    } catch (const rt::over_budget& e) {
      least = e.smallest.value();
    }
    REQUIRE(least > 0);
    auto o = testing::quick(least + least / 50);
    std::vector<std::string> told;
    o.warn = [&](const auto& text) { told.push_back(text); };
    testing::runner tight(t.planned.module, t.planned.forward, o);
    {
      auto a = tight.forward(t.planned.inputs), b = tight.forward(t.planned.inputs);
      REQUIRE(told.size() == 1);
      CHECK(told[0].find("while 1 others wait for their backward") != std::string::npos);
      (models::loss_of(a) + models::loss_of(b)).backward();
    }
    CHECK_THROWS_AS(tight.forward(t.planned.inputs), rt::over_budget);
    tight.set_budget("100%");
    models::loss_of(tight.forward(t.planned.inputs)).backward();
  }
}

TEST_CASE("other shapes and modes are planned anew, or refused") {
  twins t(0);
  auto o = testing::quick();
  testing::runner run(t.planned.module, t.planned.forward, o);
  for (int64_t batch : {8, 5, 8}) {
    auto x = ::torch::randn({batch, 32});
    for (auto* s : {&t.plain, &t.planned}) {
      ::torch::manual_seed(4);
      s->module->zero_grad();
      models::loss_of(s == &t.plain ? s->forward({x}) : run.forward({x})).backward();
    }
    check_same(grads(*t.plain.module), grads(*t.planned.module));
  }
  o.new_shapes = rt::new_shape::error;
  testing::runner fixed(t.planned.module, t.planned.forward, o);
  fixed.prepare(t.planned.inputs);
  CHECK_THROWS_WITH(fixed.forward({::torch::randn({3, 32})}), Catch::Contains("[8, 32]") && Catch::Contains("[3, 32]"));
}

TEST_CASE("decisions are taken over for other sizes of the same graph, and a better plan replaces them") {
  twins t(0);
  std::mutex mutex;
  std::vector<std::string> told;
  std::atomic<int> searches = 0;
  auto o = testing::quick("90%");
  o.log = [&](const std::string& text) {
    std::lock_guard lock(mutex);
    told.push_back(text);
  };
  o.solver = [&, solver = o.solver](const problem& p, bytes_t within, const limits& l, const rt::plan_observer& watch) {
    searches += l.seconds > 0.1;
    return solver(p, within, l, watch);
  };
  testing::runner run(t.planned.module, t.planned.forward, o);
  run.prepare({::torch::randn({24, 32})});
  const int first = searches;
  auto limit = run.report().budget;
  std::size_t adopted = 0;
  auto step = [&](int64_t batch) {
    auto x = ::torch::randn({batch, 32});
    for (auto* s : {&t.plain, &t.planned}) {
      ::torch::manual_seed(static_cast<std::uint64_t>(batch));
      s->module->zero_grad();
      models::loss_of(s == &t.plain ? s->forward({x}) : run.forward({x})).backward();
    }
    check_same(grads(*t.plain.module), grads(*t.planned.module));
    CHECK(run.report().total() <= limit);
  };
  for (int64_t batch = 23; batch > 3; batch -= 2) {
    step(batch);
    adopted += run.report().solver.find("taken over") != std::string::npos || run.report().recomputed == 0;
  }
  CHECK(adopted == 10);
  CHECK(searches == first);
  CHECK(run.reports().size() >= 11);

  // The decisions are looked at again once they are used again.
  for (int k = 0; k < 200 && searches == first; ++k) step(23);
  if (run.report().recomputed > 0) CHECK(searches > first);
  run.set_budget("100%");
  limit = run.report().budget;
  step(23);
  CHECK(run.report().recomputed == 0);
}

TEST_CASE("a step waits for a first plan only, and a better one is found beside the steps", "[device]") {
  twins t(0);
  for (auto* m : {&t.plain, &t.planned}) {
    ::torch::manual_seed(17);
    *m = models::gpt(2, 6, 48, 32);
  }
  constexpr double brief = 0.2;  // seconds; a search beside the steps has more for each of its rounds
  std::atomic<int> whole = 0;
  auto o = testing::quick("70%");
  o.limits.seconds = 2;
  o.first_seconds = brief / 2;
  o.solver = [&, solver = o.solver, most = max_bytes](const problem& p, bytes_t within, const limits& l,
                                                      const rt::plan_observer& watch) mutable {
    if (l.seconds > brief) {
      ++whole;
      return solver(p, within, l, watch);
    }
    most = std::min(most, within - (within - p.held_bytes()) / 8);  // what is left over is found later
    auto r = solver(p, std::min(within, most), {.seconds = 2}, watch);
    if (!r.found()) return r;
    r.status = status::feasible;
    r.bound = 0;
    return r;
  };
  testing::runner run(t.planned.module, t.planned.forward, o);
  run.prepare(t.planned.inputs);
  CHECK(whole == 0);
  const auto first = run.report();
  REQUIRE(first.recomputed > 0);
  CHECK(first.gap > o.limits.gap);
  const auto step = [&] {
    for (auto* s : {&t.plain, &t.planned}) {
      ::torch::manual_seed(3);
      s->module->zero_grad();
      models::loss_of(s == &t.plain ? s->forward(s->inputs) : run.forward(s->inputs)).backward();
    }
    check_same(grads(*t.plain.module), grads(*t.planned.module));
    CHECK(run.report().total() <= first.budget);
  };
  step();
  CHECK(whole == 0);  // which begins with the second step
  for (int k = 0; k < 500 && run.report().step_seconds == first.step_seconds; ++k) step();
  CHECK(whole > 0);
  CHECK(run.report().step_seconds < first.step_seconds);

  o.first_seconds = o.limits.seconds;
  whole = 0;
  testing::runner patient(t.planned.module, t.planned.forward, o);
  patient.prepare(t.planned.inputs);
  CHECK(whole > 0);

  o.first_seconds = -1;
  CHECK_THROWS_WITH(testing::runner(t.planned.module, t.planned.forward, o), Catch::Contains("first_seconds"));
}

TEST_CASE("a search beside the steps that fails, or whose log does, ends nothing else") {
  const bool log_fails = GENERATE(false, true);
  const auto s = models::gpt(2, 6, 48, 32);
  std::atomic<int> failed = 0;
  const auto beside = [here = std::this_thread::get_id()] { return std::this_thread::get_id() != here; };
  auto o = testing::quick("70%");
  o.solver = [&, solver = o.solver](const problem& p, bytes_t within, const limits& l, const rt::plan_observer& watch) {
    if (beside()) throw std::runtime_error("solver " + std::to_string(++failed));
    return solver(p, within, l, watch);
  };
  o.log = [&](const std::string&) {
    if (log_fails && beside()) throw std::runtime_error("log");
  };
  {
    testing::runner run(s.module, s.forward, o);
    for (const int64_t length : {48, 40, 32, 24})
      for (int step = 0; step < 4; ++step) {
        auto x = s.inputs;
        for (auto& t : x) t = t.slice(1, 0, length).contiguous();
        models::loss_of(run.forward(x)).backward();
        s.module->zero_grad();
      }
  }
  CHECK(failed > 0);
}

TEST_CASE("a session tells of its steps while one of them is on another thread") {
  ::torch::manual_seed(6);
  const auto s = models::gpt(4, 8, 64, 64);
  auto o = testing::quick("60%");
  o.solver = rt::default_solver();
  o.far = rt::on_host(c10::kCPU, max_bytes);
  o.far.rates = copy_rates{1e12, 1e12, 0};
  testing::runner run(s.module, s.forward, o);
  for (int step = 0; step < 4; ++step) {
    const auto loss = models::loss_of(run.forward(s.inputs));
    std::thread other([&] { loss.backward(); });
    for (int k = 0; k < 50; ++k) CHECK(run.report().waited >= 0);
    other.join();
    s.module->zero_grad();
  }
  CHECK(run.report().moved_in > 0);
}

TEST_CASE("kinds of inputs that were not used for long are forgotten; others may run plain") {
  twins t(0);
  auto o = testing::quick();
  o.most_shapes = 3;
  testing::runner run(t.planned.module, t.planned.forward, o);
  for (int64_t batch : {4, 5, 6, 7, 8, 5}) run.prepare({::torch::randn({batch, 32})});
  CHECK(run.reports().size() == 3);
  o.new_shapes = rt::new_shape::plain;
  testing::runner plain(t.planned.module, t.planned.forward, o);
  plain.prepare({::torch::randn({4, 32})});
  for (int k = 0; k < 2; ++k) models::loss_of(plain.forward({::torch::randn({5, 32})})).backward();
  CHECK(plain.reports().size() == 1);
  CHECK(t.planned.module->parameters()[0].grad().defined());
}

TEST_CASE("misuse and failures are typed errors, and leave the module usable") {
  twins t(3);
  CHECK_THROWS_AS(rt::budget("plenty"), bad_option);
  CHECK_THROWS_AS(rt::budget("-3MiB"), bad_option);
  CHECK_THROWS_AS(rt::budget(bytes_t{-1}), bad_option);
  CHECK_THROWS_AS(rt::budget("-5%"), bad_option);
  try {
    testing::runner run(t.planned.module, t.planned.forward, testing::quick(bytes_t{100}));
    run.prepare(t.planned.inputs);
    FAIL("100 bytes were enough");
  } catch (const rt::over_budget& e) {
    CHECK(e.asked == 100);
    CHECK(e.bound > 100);
  }
  testing::runner run(t.planned.module, t.planned.forward, testing::quick());
  auto loss = models::loss_of(run.forward(t.planned.inputs));
  loss.backward();
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("second time"));

  loss = models::loss_of(run.forward(t.planned.inputs));
  loss.backward({}, true);
  CHECK_THROWS_AS(loss.backward(), rt::not_supported);

  loss = models::loss_of(run.forward(t.planned.inputs));
  {
    at::NoGradGuard no_grad;
    for (auto& p : t.planned.module->parameters()) p.mul_(1);
  }
  CHECK_THROWS_WITH(loss.backward(), Catch::Contains("modified by an inplace operation"));
  loss.reset();

  auto bad = t.planned.inputs;
  bad[0] = ::torch::full_like(bad[0], 1000);  // beyond the vocabulary
  CHECK_THROWS(run.forward(bad));
  models::loss_of(run.forward(t.planned.inputs)).backward();
}

TEST_CASE("autograd::grad, hooks, two modules in one process, a forward without backward") {
  twins t(3), u(0);
  testing::runner run(t.planned.module, t.planned.forward, testing::quick()),
      other(u.planned.module, u.planned.forward, testing::quick());
  ::torch::manual_seed(2);
  auto params = t.plain.module->parameters();
  auto expected = ::torch::autograd::grad({models::loss_of(t.plain.forward(t.plain.inputs))}, params);
  for (int k = 0; k < 3; ++k) {
    ::torch::manual_seed(2);
    auto outputs = run.forward(t.planned.inputs);
    { auto unused = other.forward(u.planned.inputs); }
    int calls = 0;
    const auto hook = t.planned.module->parameters()[0].register_hook([&](const at::Tensor&) { ++calls; });
    auto given = t.planned.module->parameters();
    ::torch::manual_seed(2);
    if (k < 2) {
      check_same(expected, ::torch::autograd::grad({models::loss_of(outputs)}, given));
    } else {
      models::loss_of(outputs).backward();
      CHECK(calls == 1);
      check_same(expected, grads(*t.planned.module));
    }
    t.planned.module->parameters()[0].remove_hook(hook);
  }
  CHECK(run.report().unplanned == 0);
}

TEST_CASE("an absolute budget holds whatever gradients there are") {
  ::torch::manual_seed(5);
  const auto planned = models::gpt(4, 8, 64, 64);
  bytes_t held = 0, gradients = 0;
  for (const auto& p : planned.module->parameters()) gradients += static_cast<bytes_t>(p.nbytes());
  held = gradients;
  for (const auto& t : planned.inputs) held += static_cast<bytes_t>(t.nbytes());
  at::set_num_threads(2);
  testing::runner whole(planned.module, planned.forward, testing::quick());
  whole.prepare(planned.inputs);
  const auto constants = whole.report().constants;
  const auto need = whole.report().store_all;

  const int threads = GENERATE(1, 2);
  at::set_num_threads(threads);
  for (const bytes_t beyond : {need + gradients, need, need * 8 / 10}) {
    const auto limit = held + constants + beyond;
    const rt::meter counting;
    const auto base = rt::meter::live();
    testing::runner run(planned.module, planned.forward, testing::quick(limit));
    run.prepare(planned.inputs);
    INFO("gradients " << gradients << ", plain step " << need << ", beyond " << beyond);
    for (int step = 0; step < (threads == 1 ? 6 : 3); ++step) {
      const int order = step % 3;  // gradients dropped after the step; after the next forward; accumulated
      INFO("step " << step);
      rt::meter::reset_peak();
      {
        auto loss = run.forward(planned.inputs)[0];
        if (order == 1) planned.module->zero_grad();
        loss.backward();
        if (order == 0) planned.module->zero_grad();
      }
      CHECK(rt::meter::peak() - base <= beyond + constants);
      CHECK(run.report().total() <= limit);
    }
    planned.module->zero_grad();
    CHECK(run.report().unplanned == 0);
  }
  at::set_num_threads(1);
}

TEST_CASE("a first step whose loss leaves outputs out stays within the budget") {
  ::torch::manual_seed(4);
  const auto net = std::make_shared<::torch::nn::Linear>(400, 400);
  const auto w = (*net)->weight;
  const auto x = ::torch::randn({400, 400});
  const auto forward = [&w](const std::vector<at::Tensor>& in) {
    auto h = in[0];
    for (int i = 0; i < 6; ++i) h = h.matmul(w).tanh();
    return std::vector<at::Tensor>{h.sum(), h.sin().cumsum(1)};
  };
  const rt::meter counting;
  const auto base = rt::meter::live();
  bytes_t held = 0, budget = 0;
  {
    testing::runner all(net->ptr(), forward, testing::quick());
    all.prepare({x});
    held = all.report().held();
    budget = held + (all.report().budget - held) * 7 / 10;
  }
  testing::runner run(net->ptr(), forward, testing::quick(budget));
  run.prepare({x});
  for (int step = 0; step < 3; ++step) {
    INFO("step " << step);
    rt::meter::reset_peak();
    run.forward({x})[0].backward();
    net->ptr()->zero_grad();
    CHECK(rt::meter::peak() - base <= budget - held);
  }
}

TEST_CASE("no budget comes to more than `most`") {
  for (const char* share : {"100%", "1 GiB"}) {
    twins t(0);
    auto options = testing::quick(share);
    testing::runner whole(t.plain.module, t.plain.forward, options);
    whole.prepare(t.plain.inputs);
    for (const bytes_t left : {0, 1000, -8000}) {
      options.most = whole.report().total() + left;
      testing::runner run(t.planned.module, t.planned.forward, options);
      try {
        run.prepare(t.planned.inputs);
        CHECK(left >= 0);
        CHECK(run.report().budget == (left == 0 || std::string(share) != "100%" ? options.most : whole.report().budget));
      } catch (const rt::over_budget& e) {
        CHECK(left < 0);
        CHECK(e.asked == options.most);
      }
    }
  }
  auto options = testing::quick("100%");
  options.most = -1;
  twins t(0);
  CHECK_THROWS_WITH(testing::runner(t.plain.module, t.plain.forward, options), Catch::Contains("wrap_options.most"));
}

TEST_CASE("values that go to a disk: results, limits, nothing without need") {
  ::torch::manual_seed(6);
  const auto folder = std::filesystem::temp_directory_path().string();
  struct count final : rt::link {
    explicit count(int& n) : copies(n) {}
    rt::ticket copy(const rt::block& to, const rt::block& from, std::vector<rt::ticket> after) override {
      ++copies;
      return inner->copy(to, from, std::move(after));
    }
    int& copies;
    std::unique_ptr<rt::link> inner = rt::host_link();
  };
  const auto make = [] {
    ::torch::manual_seed(17);
    return models::gpt(4, 8, 64, 64);
  };
  const auto plain = make(), planned = make();
  int copies = 0;
  const auto options = [&](const rt::budget& b, bytes_t limit) {
    auto o = testing::quick(b);
    o.solver = rt::default_solver();
    o.far = {rt::file_memory(folder, limit), std::make_shared<count>(copies), std::make_shared<count>(copies),
             copy_rates{1e12, 1e12, 0}};
    return o;
  };
  const auto train = [&](testing::runner& run) {
    for (int step = 0; step < 3; ++step) {
      for (const auto* s : {&plain, &planned}) s->module->zero_grad();
      ::torch::manual_seed(static_cast<std::uint64_t>(step));
      auto expected = plain.forward(planned.inputs);
      models::loss_of(expected).backward();
      ::torch::manual_seed(static_cast<std::uint64_t>(step));
      auto outputs = run.forward(planned.inputs);
      check_same(expected, outputs);
      models::loss_of(outputs).backward();
      check_same(grads(*plain.module), grads(*planned.module));
      check_same(plain.module->buffers(), planned.module->buffers());
      CHECK(run.report().total() <= run.report().budget);
    }
  };
  bytes_t far = 0;
  {
    testing::runner run(planned.module, planned.forward, options("60%", max_bytes));
    run.prepare(planned.inputs);
    CHECK(copies == 0);
    train(run);
    far = run.report().far;
    CHECK(far > 0);
    CHECK(copies > 0);
    CHECK(run.report().moved_in > 0);
    CHECK(run.report().moved_out >= far);
  }
  for (const auto limit : {far, far / 2, bytes_t{0}}) {
    INFO("limit " << limit);
    testing::runner run(planned.module, planned.forward, options("60%", limit));
    train(run);
    CHECK(run.report().far <= limit);
  }
  copies = 0;
  testing::runner run(planned.module, planned.forward, options("100%", max_bytes));
  train(run);
  CHECK(run.report().far == 0);
  CHECK(copies == 0);
}

TEST_CASE("a step without memory is planned as one with it, and not run") {
  ::torch::manual_seed(2);
  const auto s = models::all().at(0);
  auto options = testing::quick("100%");
  options.device = [](at::ScalarType) { return remat::roofline{1e12, 1e11}; };
  testing::runner real(s.module, s.forward, options);
  real.prepare(s.inputs);
  CHECK_THROWS_AS(real.forward(s.inputs), rt::not_supported);

  const auto program = rt::capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers());
  const auto parameters = s.module->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto p = parameters[i];
    p.set_data(rt::without_memory({p}).front());
  }
  auto inputs = rt::without_memory(s.inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i].requires_grad_(s.inputs[i].requires_grad());
  const auto shadow = rt::capture(s.forward, inputs, s.module->parameters(), s.module->buffers());
  CHECK(rt::explain(*shadow.step) == rt::explain(*program.step));
  testing::runner hollow(s.module, s.forward, options);
  hollow.prepare(inputs);
  CHECK(hollow.report().total() == real.report().total());
  CHECK(hollow.report().step_seconds == real.report().step_seconds);
}

namespace {

/// Other low bits in every call, like a kernel with atomic additions.
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

/// The backward multiplies by a number, by the noisy operator where that is asked for.
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

/// Two branches: the first one may be noisy, the second one never is.
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

/// Trains `branches`, and keeps what is logged.
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
    o.warn = [this](const std::string& text) { told.push_back(text); };
    return o;
  }
  /// By a plan, or plain.
  void step(bool planned = true) {
    ::torch::manual_seed(7);
    const auto x = ::torch::randn({4, 6}).to(test_device());
    const auto out = planned ? run.forward({x}) : net->forward(x);
    ((out[0] * out[0]).sum() + (out[1] * out[1]).sum()).backward();
  }
  std::vector<std::string> told;
  std::shared_ptr<branches> net;
  testing::runner run;
};

}  // namespace

TEST_CASE("verify compares what is the same in every plain step, and names operators that are not", "[device]") {
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
      CHECK(v.told.empty());
      continue;
    }
    REQUIRE(v.told.size() == static_cast<std::size_t>(k));
    CHECK_THAT(v.told.back(), Contains("come from remat_test::noisy") && !Contains("::noisy,") && !Contains("calls"));
    CHECK_THAT(v.told.back(), Contains(". 1 of 2 gradients is not compared: first"));
    CHECK(v.told.back().ends_with(": first"));
    const bool output = v.told.back().find(". 1 of 3 outputs and buffers is not compared: output 0.") != std::string::npos;
    CHECK(output == (where == noise::forward));
  }
  // The rest of the step is compared.
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

TEST_CASE("verify does without a second plain step where an input has been written since", "[device]") {
  verified v(noise::forward);
  v.net->first.requires_grad_(false);
  v.net->second.requires_grad_(false);
  auto x = ::torch::randn({4, 6}).to(test_device()).requires_grad_();
  const auto out = v.run.forward({x});
  x.unsafeGetTensorImpl()->bump_version();  // no backward of a product with a constant reads it
  (out[0].sum() + out[1].sum()).backward();
  REQUIRE(v.told.size() == 1);
  CHECK_THAT(v.told[0],
             Catch::Contains("an operator that is not known") && Catch::Contains("1 of 1 gradients is not compared: input 0"));
}
