// SPDX-License-Identifier: Apache-2.0
// Steps in flight, new shapes, and plans that replace each other.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <deque>
#include <future>
#include <mutex>
#include <optional>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/wrap.hpp>
#include <stdexcept>
#include <thread>

#include "../src/session/background.hpp"
#include "compare.hpp"
#include "models.hpp"
#include "quick.hpp"
#include "twins.hpp"

using namespace wrap_tests;

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
      if (s == &t.planned) {  // the budget is for both steps, which share their working memory
        CHECK(run.report().in_flight == 2);
        CHECK(run.report().left > one.left);
      }
      (2 * models::loss_of(b) + models::loss_of(a)).backward();
    }
    check_same(grads(*t.plain.module), grads(*t.planned.module));
  }

  SECTION("within a budget in bytes") {
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

  SECTION("an error if no plan for both is known, once the session has learned of two steps") {
    bytes_t least = 0;  // for one step
    try {
      testing::runner(t.planned.module, t.planned.forward, testing::quick(bytes_t{1})).prepare(t.planned.inputs);
    } catch (const rt::over_budget& e) {
      least = e.smallest.value();
    }
    REQUIRE(least > 0);
    auto o = testing::quick(least + least / 50);
    std::vector<std::string> warnings;
    o.warn = [&](const auto& text) { warnings.push_back(text); };
    testing::runner tight(t.planned.module, t.planned.forward, o);
    {
      auto a = tight.forward(t.planned.inputs), b = tight.forward(t.planned.inputs);
      REQUIRE(warnings.size() == 1);
      CHECK(warnings[0].find("while 1 others wait for their backward") != std::string::npos);
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

TEST_CASE("the decisions of a plan are reused for other sizes of the same graph, and a better plan replaces them") {
  twins t(0);
  std::mutex mutex;
  std::vector<std::string> messages;
  std::atomic<int> searches = 0;
  auto o = testing::quick("90%");
  o.log = [&](const std::string& text) {
    std::lock_guard lock(mutex);
    messages.push_back(text);
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

  // The decisions are revised once they are used again.
  for (int k = 0; k < 200 && searches == first; ++k) step(23);
  if (run.report().recomputed > 0) CHECK(searches > first);
  run.set_budget("100%");
  limit = run.report().budget;
  step(23);
  CHECK(run.report().recomputed == 0);
}

TEST_CASE("a step waits only for the first plan, and a background search finds a better plan", "[device]") {
  twins t(0);
  for (auto* m : {&t.plain, &t.planned}) {
    ::torch::manual_seed(17);
    *m = models::gpt(2, 6, 48, 32);
  }
  constexpr double brief = 0.2;  // seconds; a background search has more for each of its rounds
  std::atomic<int> whole = 0;
  auto o = testing::quick("70%");
  o.limits.seconds = 2;
  o.first_seconds = brief / 2;
  o.limits.gap = 0.01;  // less than the distance of the first plan to the time of all operators
  o.solver = [&, solver = o.solver, most = max_bytes](const problem& p, bytes_t within, const limits& l,
                                                      const rt::plan_observer& watch) mutable {
    if (l.seconds > brief) {
      ++whole;
      return solver(p, within, l, watch);
    }
    most = std::min(most, within - (within - p.held_bytes()) / 8);  // the solver leaves room for a later improvement
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
  CHECK(whole == 0);  // the full search begins with the second step
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

TEST_CASE("a background search that fails, or whose log fails, ends nothing else") {
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

TEST_CASE("a forked process ends and works without the background searches of its parent", "[fork]") {
  std::promise<void> end;
  const auto ended = end.get_future().share();
  std::deque<std::optional<rt::background>> all(16);
  for (auto& b : all) b.emplace().start([ended] { ended.wait(); });
  const auto child = ::fork();
  if (child == 0) {
    for (int i = 0; i < 3; ++i) std::thread([] {}).join();  // unused stacks go back to the system
    std::atomic<int> ran = 0;
    all[0]->start([&] { ++ran; });
    for (auto& b : all) b.reset();
    ::_exit(ran == 1 ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  end.set_value();
}

TEST_CASE("the report can be read while a step runs on another thread") {
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

TEST_CASE("input shapes that were not used for long are forgotten, and new shapes may run plain") {
  twins t(0);
  auto o = testing::quick();
  o.max_shapes = 3;
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
