// SPDX-License-Identifier: Apache-2.0
// Misuse, budgets, disks, and steps without memory.
#include <torch/torch.h>

#include <ATen/Parallel.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>

#include "compare.hpp"
#include "default_device.hpp"
#include "models.hpp"
#include "quick.hpp"
#include "twins.hpp"

using namespace wrap_tests;

TEST_CASE("misuse and failures are typed errors, and leave the module usable", "[device]") {
  const on_test_device there;
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

  if (test_device().is_cpu() || hardware::emulated()) {  // otherwise the device is lost
    auto bad = t.planned.inputs;
    bad[0] = ::torch::full_like(bad[0], 1000);  // outside of the vocabulary
    CHECK_THROWS(run.forward(bad));
  }
  models::loss_of(run.forward(t.planned.inputs)).backward();
}

TEST_CASE("autograd::grad, hooks, two modules in one process, and a forward without a backward", "[device]") {
  const on_test_device there;
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
  CHECK(run.report().unplanned_allocations == 0);
}

TEST_CASE("an absolute budget holds with any existing gradients") {
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
      const int order = step % 3;  // gradients dropped after the step, dropped after the next forward, or accumulated
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
    CHECK(run.report().unplanned_allocations == 0);
  }
  at::set_num_threads(1);
}

TEST_CASE("the first step with a loss that ignores some outputs stays within the budget") {
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

TEST_CASE("no budget exceeds the option `max_budget`", "[device]") {
  const on_test_device there;
  for (const char* share : {"100% of activations", "1 GiB"}) {
    twins t(0);
    auto options = testing::quick(share);
    testing::runner whole(t.plain.module, t.plain.forward, options);
    whole.prepare(t.plain.inputs);
    for (const bytes_t left : {0, 1000, -8000}) {
      options.max_budget = whole.report().total() + left;
      testing::runner run(t.planned.module, t.planned.forward, options);
      try {
        run.prepare(t.planned.inputs);
        CHECK(left >= 0);
        CHECK(run.report().budget == (left == 0 || std::string(share) == "1 GiB" ? options.max_budget : whole.report().budget));
      } catch (const rt::over_budget& e) {
        CHECK(left < 0);
        CHECK(e.asked == options.max_budget);
      }
    }
  }
  auto options = testing::quick("100%");
  options.max_budget = -1;
  twins t(0);
  CHECK_THROWS_WITH(testing::runner(t.plain.module, t.plain.forward, options), Catch::Contains("wrap_options.max_budget"));
}

TEST_CASE("values on a disk: results, limits, and no copies without need", "[device]") {
  const on_test_device there;
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
    testing::runner run(planned.module, planned.forward, options("60% of activations", max_bytes));
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
    testing::runner run(planned.module, planned.forward, options("60% of activations", limit));
    train(run);
    CHECK(run.report().far <= limit);
  }
  copies = 0;
  testing::runner run(planned.module, planned.forward, options("100% of activations", max_bytes));
  train(run);
  CHECK(run.report().far == 0);
  CHECK(copies == 0);
}

TEST_CASE("a step on tensors without memory is planned like any step, and not run") {
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
