// SPDX-License-Identifier: Apache-2.0
#include <torch/torch.h>

#include <ATen/Parallel.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <remat/copies/lay_copies.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/evaluate_tiers.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>
#include <thread>

#include "compare.hpp"
#include "models.hpp"

using namespace remat;
using namespace remat::pytorch;

namespace {

struct prepared {
  std::shared_ptr<const program> step;
  std::optional<bindings> tensors;
  program_profile profiles;
  problem p;
};

prepared prepare(const models::sample& s) {
  prepared x;
  const auto c = capture(s.forward, s.inputs, s.module->parameters(), s.module->buffers());
  x.step = c.step;
  x.tensors = c.tensors;
  x.profiles = profile(*x.step, {.cache = {}, .seconds = 0});
  x.p = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name);
  return x;
}

/// First computations in order; before each node, some random ones run again together with all they need.
schedule random_schedule(const problem& p, unsigned seed, double share) {
  std::mt19937 random(seed);
  std::vector<operation_id> order;
  std::vector<bool> fresh(p.values().size());
  for (index_t n = 0; n < p.operations().size(); ++n) {
    if (n > 0 && random() % 1000 < 1000 * share) {
      const auto again = static_cast<index_t>(random() % n);
      if (!p.operations()[again].once) order.push_back(again);
    }
    order.push_back(n);
  }
  return with_drops(p, order);
}

/// Drops what the backward needs of the forward, and computes it again where it is needed first.
schedule recompute_all(const problem& p, index_t loss) {
  std::vector<operation_id> order;
  std::vector<bool> there(p.values().size(), false);
  auto compute = [&](auto& self, index_t n) -> void {
    for (auto v : p.operations()[n].inputs)
      if (!p.is_source(v) && !there[v]) self(self, p.producer(v));
    order.push_back(n);
    for (auto v : p.operations()[n].outputs) there[v] = true;
  };
  for (index_t n = 0; n < p.operations().size(); ++n) {
    compute(compute, n);
    if (n != loss) continue;
    for (index_t v = 0; v < p.values().size(); ++v)
      if (!p.is_source(v) && p.producer(v) < loss && !p.operations()[p.producer(v)].once && !p.is_target(v)) there[v] = false;
  }
  return with_drops(p, order);
}

/// The same computations; values go to far memory and come back at random, and what starts there is fetched.
schedule with_random_copies(const problem& p, const schedule& s, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<bool> here(p.values().size()), far(p.values().size()), wanted(p.values().size());
  for (value_id v = 0; v < here.size(); ++v) {
    far[v] = p.values()[v].starts != device_tier;
    here[v] = p.is_source(v) && !far[v];
    wanted[v] = p.is_source(v);
  }
  schedule made;
  const auto bring = [&](value_id v) {
    if (here[v]) return;
    made.prefetch(v);
    here[v] = true;
  };
  for (const auto& x : s.steps) {
    if (x.what == action::drop) {
      if (here[x.value()]) made.drop(x.value());
      here[x.value()] = wanted[x.value()] = false;
      continue;
    }
    const auto& op = p.operations()[x.operation()];
    for (auto v : op.inputs) bring(v);
    made.compute(x.operation());
    for (auto v : op.outputs) here[v] = wanted[v] = true;
    for (value_id v = 0; v < here.size(); ++v) {
      if (!wanted[v] || !p.values()[v].movable || p.values()[v].bytes == 0 || random() % 4 != 0) continue;
      if (!here[v]) {
        bring(v);
        continue;
      }
      if (!far[v] || (p.plain() && random() % 4 == 0)) made.offload(v);
      far[v] = true;
      if (random() % 2 == 0) continue;
      made.drop(v);
      here[v] = false;
    }
  }
  for (auto v : p.targets()) bring(v);
  return made;
}

/// Copies that begin late.
class late_link final : public remat::pytorch::link {
 public:
  explicit late_link(unsigned seed) : random_(seed) {}
  ticket copy(const block& to, const block& from, std::vector<ticket> after) override {
    struct nap final : event {
      explicit nap(int us) : microseconds(us) {}
      bool reached() const override { return false; }
      void wait() const override { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }
      int microseconds;
    };
    after.push_back(std::make_shared<nap>(random_() % 8 == 0 ? 300 : 0));
    return inner_->copy(to, from, std::move(after));
  }

 private:
  std::mt19937 random_;
  std::unique_ptr<remat::pytorch::link> inner_ = host_link();
};

struct outcome {
  std::vector<at::Tensor> outputs, grads, input_grads, buffers;
  at::Tensor generator;
};

outcome eager(const models::sample& s) {
  outcome r;
  auto outputs = s.forward(s.inputs);
  r.outputs = copies_of(outputs);
  std::vector<at::Tensor> wanted = s.module->parameters();
  std::erase_if(wanted, [](const auto& t) { return !t.requires_grad(); });
  const auto n = wanted.size();
  for (const auto& t : s.inputs)
    if (t.requires_grad()) wanted.push_back(t);
  auto g = ::torch::autograd::grad({models::loss_of(outputs)}, wanted, {}, false, false, true);
  r.grads = copies_of({g.begin(), g.begin() + static_cast<std::ptrdiff_t>(n)});
  r.input_grads = copies_of({g.begin() + static_cast<std::ptrdiff_t>(n), g.end()});
  r.buffers = copies_of(s.module->buffers());
  r.generator = state_of_test_generator();
  return r;
}

/// Gradients of the parameters that require one, undefined where there is none.
/// @param given what `take` was given, if it was
outcome finished(const models::sample& s, executor& e, const std::vector<at::Tensor>& outputs, const bindings& tensors,
                 const executor::taker& take = {}, const std::vector<at::Tensor>& taken = {}) {
  outcome r;
  r.outputs = copies_of(outputs);
  std::vector<at::Tensor> leaves, given;
  const auto& step = e.plan().step();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    leaves.push_back(outputs[i].detach());
    if (step.differentiable[i]) leaves.back().requires_grad_();
  }
  std::vector<at::Tensor> wanted;
  for (const auto& l : leaves)
    if (l.requires_grad()) wanted.push_back(l);
  const auto g = ::torch::autograd::grad({models::loss_of(leaves)}, wanted);
  std::size_t next = 0;
  for (const auto& l : leaves) given.push_back(l.requires_grad() ? g[next++] : at::Tensor());
  auto grads = e.backward(given, {}, take);
  for (std::size_t i = 0; i < taken.size(); ++i)
    if (!grads.parameters[i].defined()) grads.parameters[i] = taken[i];
  for (const auto& p : s.module->parameters()) {
    if (!p.requires_grad()) continue;
    r.grads.emplace_back();
    for (std::size_t i = 0; i < step.parameters.size(); ++i)
      if (tensors[step.parameters[i]].is_same(p)) r.grads.back() = grads.parameters[i].clone();
  }
  for (std::size_t i = 0; i < s.inputs.size(); ++i)
    if (s.inputs[i].requires_grad()) r.input_grads.push_back(grads.inputs[i].clone());
  r.buffers = copies_of(s.module->buffers());
  r.generator = state_of_test_generator();
  return r;
}

outcome planned(const models::sample& s, executor& e, const bindings& tensors, const executor::taker& take = {},
                const std::vector<at::Tensor>& taken = {}) {
  return finished(s, e, e.forward(s.inputs), tensors, take, taken);
}

void compare(const outcome& a, const outcome& b) {
  auto lists = [](const auto& x, const auto& y) {
    REQUIRE(x.size() == y.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      INFO("tensor " << i);
      CHECK(same_layout(x[i], y[i]));
    }
  };
  lists(a.outputs, b.outputs);
  lists(a.grads, b.grads);
  lists(a.input_grads, b.input_grads);
  lists(a.buffers, b.buffers);
  CHECK(same_bits(a.generator, b.generator));
}

void restore(const models::sample& s, const std::vector<at::Tensor>& buffers) {
  at::NoGradGuard no_grad;
  auto now = s.module->buffers();
  for (std::size_t i = 0; i < now.size(); ++i) now[i].copy_(buffers[i]);
  ::torch::manual_seed(11);
}

}  // namespace

TEST_CASE("schedules give what eager mode gives, bit by bit, without unplanned allocations", "[device]") {
  const hardware::option late("late", 20);
  ::torch::manual_seed(3);
  for (const auto& s : models::all()) {
    INFO(s.name);
    REQUIRE(hardware::races() == "");
    const auto x = prepare(s);
    const auto buffers = copies_of(s.module->buffers());
    std::vector<schedule> schedules = {store_all_schedule(x.p), recompute_all(x.p, x.step->loss)};
    for (unsigned seed = 0; seed < 3; ++seed) schedules.push_back(random_schedule(x.p, seed, 0.3));
    restore(s, buffers);
    std::vector<outcome> expected = {eager(s), eager(s)};
    REQUIRE(hardware::races() == "");
    for (const auto& plan : schedules) {
      executor e(std::make_shared<execution_plan>(x.step, plan, x.profiles), *x.tensors, device_of(test_device()));
      restore(s, buffers);
      for (const auto& o : expected) compare(o, planned(s, e, *x.tensors));
      REQUIRE(hardware::races() == "");
      CHECK(e.unplanned() == 0);
      CHECK_FALSE(e.in_flight());
      CHECK(e.plan().arena_bytes() >= e.plan().live_peak());
    }
    CHECK(execution_plan(x.step, schedules[1], x.profiles).recomputed() > 0);
  }
}

TEST_CASE("steps in flight share the memory in which they compute", "[device]") {
  const hardware::option late("late", 20);
  ::torch::manual_seed(3);
  auto& on = device_of(test_device());
  bytes_t held = 0, all = 0;
  for (const auto& s : models::all()) {
    INFO(s.name);
    const auto x = prepare(s);
    const auto p = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name, copy_rates{1, 1, 0});
    const auto buffers = copies_of(s.module->buffers());
    std::vector<schedule> schedules = {store_all_schedule(x.p), recompute_all(x.p, x.step->loss), random_schedule(x.p, 1, 0.3)};
    schedules.push_back(with_random_copies(p, random_schedule(p, 2, 0.3), 2));
    restore(s, buffers);
    const auto expected = eager(s);
    for (const auto& schedule : schedules) {
      const auto plan = std::make_shared<execution_plan>(x.step, schedule, x.profiles, layout_options(), 0, placing::zones);
      CHECK(plan->held_bytes() >= plan->arena_bytes());
      held += plan->held_bytes();
      all += plan->needed_bytes();
      const auto shared = std::make_shared<working_memory>(on.memory());
      const auto overwrite = [&] {  // nothing there is needed between the computations
        if (shared->bytes() == 0) return;
        const auto piece = shared->take(shared->bytes(), nullptr);
        if (test_device().is_cpu()) std::memset(piece->in->data(), 0xff, static_cast<std::size_t>(piece->in->bytes()));
        shared->give_back(*piece);
      };
      const auto far = plan->far_bytes() > 0 ? on_host(test_device(), 2 * plan->far_bytes()) : far_memory();
      executor first(plan, *x.tensors, on, far, {.working = shared}), second(plan, *x.tensors, on, far, {.working = shared});
      for (int step = 0; step < 3; ++step) {
        restore(s, buffers);
        const auto outputs = first.forward(s.inputs);
        const auto values = copies_of(outputs);
        overwrite();
        restore(s, buffers);
        compare(expected, planned(s, second, *x.tensors));
        overwrite();
        const auto now = finished(s, first, values, *x.tensors);
        CHECK(same_bits(expected.grads, now.grads));
        CHECK(same_bits(expected.input_grads, now.input_grads));
        CHECK(same_bits(expected.outputs, now.outputs));
        REQUIRE(hardware::races() == "");
        CHECK(shared->bytes() == plan->working_bytes());
        if (step > 0) continue;
        const auto taken = plan->working_bytes() > 0 ? shared->take(1, nullptr) : nullptr;  // by another thread
        restore(s, buffers);
        compare(expected, planned(s, second, *x.tensors));
        if (taken == nullptr) continue;
        CHECK(shared->bytes() == 2 * plan->working_bytes());
        shared->give_back(*taken);
        shared->release();
        CHECK(shared->bytes() == 0);
      }
      CHECK(first.unplanned() + second.unplanned() == 0);
    }
    const auto plan = std::make_shared<execution_plan>(x.step, schedules[0], x.profiles, layout_options(), 0, placing::zones);
    if (plan->working_bytes() > 0) CHECK_THROWS_AS(executor(plan, *x.tensors, on), broken_contract);
  }
  CHECK(3 * held < 2 * all);
}

TEST_CASE("steps that are captured give what eager mode gives, bit by bit, at fixed addresses", "[device][accelerator]") {
  if (test_device().is_cpu()) return;
  ::torch::manual_seed(3);
  auto& on = device_of(test_device());
  const hardware::option late("late", 20);
  std::size_t captured = 0, refused = 0;
  for (const auto& s : models::all()) {
    const auto x = prepare(s);
    const auto p = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name, copy_rates{1, 1, 0});
    const auto buffers = copies_of(s.module->buffers()), weights = copies_of(s.module->parameters());
    const auto begin_again = [&] {
      at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < weights.size(); ++i) s.module->parameters()[i].copy_(weights[i]);
      restore(s, buffers);
    };
    const auto change = [&] {  // as an optimizer and a loader of data do
      at::NoGradGuard no_grad;
      for (auto& w : s.module->parameters()) w.mul_(0.9);
      for (const auto& t : s.inputs)
        if (t.is_floating_point()) t.detach().mul_(0.5);
    };
    const auto inputs = copies_of(s.inputs);
    const auto same_inputs = [&] {
      at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < inputs.size(); ++i) s.inputs[i].detach().copy_(inputs[i]);
    };
    constexpr int steps = 4;
    std::vector<outcome> expected;
    begin_again();
    for (int k = 0; k < steps; ++k, change()) expected.push_back(eager(s));
    same_inputs();
    std::vector<schedule> schedules = {store_all_schedule(x.p), recompute_all(x.p, x.step->loss), random_schedule(x.p, 1, 0.3)};
    for (unsigned seed = 0; seed < 2; ++seed) schedules.push_back(with_random_copies(p, random_schedule(p, seed, 0.3), seed));
    for (const auto& schedule : schedules) {
      INFO(s.name);
      const auto plan = std::make_shared<execution_plan>(x.step, schedule, x.profiles, layout_options(), 0, placing::fixed);
      executor e(plan, *x.tensors, on, on_host(test_device(), plan->far_bytes()), {.graphs = true});
      begin_again();
      for (int k = 0; k < steps; ++k, change()) compare(expected[static_cast<std::size_t>(k)], planned(s, e, *x.tensors));
      same_inputs();
      INFO(e.not_captured());
      CHECK((e.not_captured().empty() || e.not_captured() == plan->moves_because()));
      (e.not_captured().empty() ? captured : refused) += 1;
      CHECK(e.unplanned() == 0);
      REQUIRE(hardware::races() == "");
    }
  }
  CHECK(captured > 4 * refused);
}

TEST_CASE("values that were away give what eager mode gives, bit by bit", "[device]") {
  ::torch::manual_seed(4);
  const auto folder = std::filesystem::temp_directory_path().string();
  std::size_t moves = 0;
  const hardware::option late("late", 20);
  std::vector<std::string> places = {"in memory", "on disk"};
  if (!test_device().is_cpu()) places.push_back("on streams");
  for (const auto& s : models::all()) {
    const auto x = prepare(s);
    const auto p = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name, copy_rates{1, 1, 0});
    const auto buffers = copies_of(s.module->buffers());
    restore(s, buffers);
    std::vector<outcome> expected = {eager(s), eager(s)};
    std::vector<schedule> schedules;
    for (unsigned seed = 0; seed < 4; ++seed)
      schedules.push_back(with_random_copies(p, seed % 2 == 0 ? store_all_schedule(p) : random_schedule(p, seed, 0.3), seed));
    const auto needed = needed_operations(p);
    for (const double part : {0.0, 0.5}) {
      const auto least = bounds_without_search(p).budget;
      const auto most = static_cast<double>(evaluate(p, store_all_schedule(p)).peak - least);
      if (const auto laid = copies::lay_copies(p, needed, least + static_cast<bytes_t>(part * most)))
        schedules.push_back(laid->schedule);
    }
    for (const auto& plan : schedules)
      for (const auto& where : places) {
        INFO(s.name << " " << where << ", schedule " << &plan - schedules.data());
        const bool disk = where == "on disk", streams = where == "on streams";
        const auto e_plan =
            std::make_shared<execution_plan>(x.step, plan, x.profiles, layout_options{.alignment = disk ? 4096 : 64});
        const auto limit = e_plan->far_bytes();
        auto& on = device_of(test_device());
        far_memory far;
        if (!streams) {
          far = {disk ? file_memory(folder, limit) : host_memory("far", limit),
                 std::make_unique<late_link>(1),
                 std::make_unique<late_link>(2),
                 {}};
        } else {
          far = on_host(test_device(), limit);
        }
        executor e(e_plan, *x.tensors, on, far);
        restore(s, buffers);
        for (const auto& o : expected) compare(o, planned(s, e, *x.tensors));
        CHECK(e.unplanned() == 0);
        CHECK_FALSE(e.arena_in_use());
        REQUIRE(hardware::races() == "");
        moves += e_plan->moved_bytes().second > 0;
        if (e_plan->moved_bytes().first > 0)
          CHECK_THROWS_AS(executor(e_plan, *x.tensors, device_of(test_device())), broken_contract);
      }
  }
  CHECK(moves > 3 * places.size() * models::all().size());
}

TEST_CASE("a step on a device that has failed ends with that error alone", "[accelerator]") {
  if (!hardware::emulated()) return;  // a real device that fails does not come back
  ::torch::manual_seed(5);
  const auto s = models::all().front();
  const auto x = prepare(s);
  restore(s, {});
  const auto expected = eager(s);
  executor e(std::make_shared<execution_plan>(x.step, store_all_schedule(x.p), x.profiles), *x.tensors, device_of(test_device()));
  for (const bool backward : {false, true}) {
    const auto outputs = e.forward(s.inputs);
    {
      const hardware::option lost("lost", 1);
      if (backward)
        CHECK_THROWS(e.backward(outputs));
      else
        CHECK_NOTHROW(e.reset());  // as when the graph is dropped
      CHECK_FALSE(e.in_flight());
      CHECK_THROWS(e.forward(s.inputs));
      CHECK_FALSE(e.in_flight());
    }
    restore(s, {});
    compare(expected, planned(s, e, *x.tensors));
  }
}

namespace {

/// Counts what it brings, and on demand brings something else.
class telling_link final : public remat::pytorch::link {
 public:
  ticket copy(const block& to, const block& from, std::vector<ticket> after) override {
    bytes += to.bytes;
    if (!wrong) return inner_.copy(to, from, std::move(after));
    const auto zeros = host_memory("zeros")->reserve(from.bytes);
    return inner_.copy(to, {zeros, 0, from.bytes}, std::move(after));
  }
  bytes_t bytes = 0;
  bool wrong = false;

 private:
  late_link inner_{3};
};

}  // namespace

TEST_CASE("weights that are fetched give what eager mode gives, bit by bit") {
  ::torch::manual_seed(5);
  std::size_t twice = 0, on_disk = 0, together = 0;
  for (const auto& s : models::all())
    for (const std::string where : {"in memory", "on disk"}) {
      auto x = prepare(s);
      disk scratch(std::filesystem::temp_directory_path().string());
      if (where == "on disk") move_weights(*s.module, scratch);
      const auto can = fetchable(*x.step);
      const auto rates = copy_rates{1, 1, 0};
      const auto held = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name, rates);
      const auto p = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name, rates, can);
      REQUIRE(std::count(can.begin(), can.end(), true) > 0);
      for (index_t v = 0; v < can.size(); ++v) {
        CHECK(p.values()[v].held == (held.values()[v].held && !can[v]));
        CHECK((p.values()[v].starts != device_tier) == can[v]);
        if (can[v] && where == "on disk") on_disk += on_a_disk((*x.tensors)[x.step->values[v].slot]);
      }
      const auto buffers = copies_of(s.module->buffers());
      const auto weights = copies_of(s.module->parameters());
      const auto begin_again = [&] {
        at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < weights.size(); ++i) s.module->parameters()[i].copy_(weights[i]);
        restore(s, buffers);
      };
      const auto change = [&] {  // as an optimizer does
        at::NoGradGuard no_grad;
        for (auto& w : s.module->parameters()) w.mul_(0.9);
      };
      begin_again();
      std::vector<outcome> expected = {eager(s)};
      change();
      expected.push_back(eager(s));

      std::vector<schedule> schedules;
      for (unsigned seed = 0; seed < 3; ++seed) {
        const auto order = seed == 0 ? store_all_schedule(p) : random_schedule(p, seed, 0.3);
        schedules.push_back(with_random_copies(p, order, seed));
      }
      const auto least = bounds_without_search(p).budget;
      if (const auto laid = copies::lay_copies(p, needed_operations(p), least + (held.held_bytes() - p.held_bytes()) / 2))
        schedules.push_back(laid->schedule);
      schedules.push_back(schedules[1]);  // as solvers for several tiers may tell it
      for (auto& at : schedules.back().steps) at = remat::detail::with_tiers(p, at);
      for (index_t v = 0; v < can.size(); ++v)  // where it started, which is the caller's
        if (can[v]) schedules.back().drop(v, p.host());
      CHECK_NOTHROW(evaluate(p, schedules.back()));
      for (const auto& plan : schedules) {
        INFO(s.name << " " << where);
        const auto e_plan = std::make_shared<execution_plan>(x.step, plan, x.profiles);
        const auto told = std::make_shared<telling_link>();
        far_memory far = {host_memory("far", e_plan->far_bytes()), std::make_unique<late_link>(1), told, {}};
        if (e_plan->moved_bytes().first == 0 && e_plan->far_bytes() == 0) far.memory.reset();
        executor e(e_plan, *x.tensors, device_of(test_device()), far);
        begin_again();
        compare(expected[0], planned(s, e, *x.tensors));
        change();
        compare(expected[1], planned(s, e, *x.tensors));
        CHECK(e.unplanned() == 0);
        CHECK(e_plan->fetched_bytes() > 0);
        bytes_t weight_bytes = 0;
        for (index_t v = 0; v < can.size(); ++v) weight_bytes += can[v] ? x.step->values[v].bytes : 0;
        twice += e_plan->fetched_bytes() > weight_bytes;
        together += e_plan->moved_bytes().second > 0;
        CHECK(told->bytes == 2 * (e_plan->fetched_bytes() + e_plan->moved_bytes().second));
        if (e_plan->moved_bytes().second > 0) continue;
        told->wrong = true;  // what it brings is what is read
        begin_again();
        const auto other = planned(s, e, *x.tensors);
        CHECK_FALSE(same_bits(other.outputs, expected[0].outputs));
      }
      CHECK_THROWS_AS(executor(std::make_shared<execution_plan>(x.step, schedules.back(), x.profiles), *x.tensors),
                      broken_contract);
    }
  CHECK(twice > 20);
  CHECK(together > 20);
  CHECK(on_disk > 10);
}

TEST_CASE("gradients are given once nothing reads their parameters") {
  ::torch::manual_seed(6);
  std::size_t gifts = 0, too_early = 0;
  for (const auto& s : models::all()) {
    INFO(s.name);
    const auto captured = prepare(s);
    prepared x;
    x.step = std::make_shared<const program>(giving(*captured.step));
    x.tensors = captured.tensors->followed_by(x.step);
    x.profiles = profile(*x.step, {.cache = {}, .seconds = 0});
    x.p = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name);
    const auto given = given_early(*x.step);
    const auto buffers = copies_of(s.module->buffers()), parameters = copies_of(s.module->parameters());
    const auto whole_again = [&] {
      at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < parameters.size(); ++i) s.module->parameters()[i].copy_(parameters[i]);
    };
    restore(s, buffers);
    const std::vector<outcome> expected = {eager(s), eager(s)};
    std::vector<schedule> schedules = {store_all_schedule(x.p), recompute_all(x.p, x.step->loss)};
    for (unsigned seed = 0; seed < 4; ++seed) schedules.push_back(random_schedule(x.p, seed, 0.5));
    for (const auto& plan : schedules) {
      for (std::size_t i = 0; i < plan.steps.size(); ++i) {
        const auto k = plan.steps[i].what == action::compute ? x.step->nodes[plan.steps[i].which].gives : none;
        for (auto j = i + 1; k != none && j < plan.steps.size(); ++j)
          if (plan.steps[j].what == action::compute)
            for (auto v : x.step->nodes[plan.steps[j].which].inputs) too_early += v == x.step->slots[x.step->parameters[k]].value;
      }
      executor e(std::make_shared<execution_plan>(x.step, plan, x.profiles), *x.tensors);
      for (const int held : {0, 1, 2}) {  // by nobody, by the caller, by the step until it ends
        restore(s, buffers);
        std::vector<at::Tensor> taken(given.size()), kept;
        const auto take = [&](std::size_t k, at::Tensor gradient) {
          CHECK(given[k]);
          CHECK(e.owns(gradient));
          ++gifts;
          taken[k] = gradient.clone();
          at::NoGradGuard no_grad;
          at::Tensor((*x.tensors)[x.step->parameters[k]]).fill_(std::numeric_limits<double>::quiet_NaN());
          if (held == 2) return gradient;
          if (held == 1) kept.push_back(gradient);
          gradient.fill_(7);  // as its owner may
          return at::Tensor();
        };
        for (const auto& o : expected) {
          const auto now = planned(s, e, *x.tensors, take, taken);
          whole_again();
          compare(o, now);
          if (held == 0) CHECK(e.held_gifts() == 0);
          if (held != 0) CHECK(e.held_gifts() == static_cast<std::size_t>(std::count(given.begin(), given.end(), true)));
          CHECK_FALSE(e.arena_in_use());
          for (const auto& g : kept) {
            CHECK_FALSE(e.owns(g));
            CHECK(g.eq(7).all().item<bool>());
          }
        }
        CHECK(e.unplanned() == 0);
      }
    }
  }
  CHECK(gifts > 100);
  CHECK(too_early > 20);
}

TEST_CASE("replicas of a module share a program and a plan") {
  ::torch::manual_seed(5);
  const auto a = models::conv(), b = models::conv();
  const auto x = prepare(a);
  const auto plan = std::make_shared<execution_plan>(x.step, recompute_all(x.p, x.step->loss), x.profiles);
  auto announced = b.module->parameters();
  for (const auto& t : b.module->buffers()) announced.push_back(t);
  const bindings other(x.step, announced);
  executor first(plan, *x.tensors), second(plan, other);
  const auto before_a = copies_of(a.module->buffers()), before_b = copies_of(b.module->buffers());
  restore(a, before_a);
  const auto expected_a = eager(a);
  restore(b, before_b);
  const auto expected_b = eager(b);
  CHECK_FALSE(same_bits(expected_a.grads, expected_b.grads));
  for (int step = 0; step < 2; ++step) {
    restore(b, before_b);
    compare(expected_b, planned(b, second, other));
    restore(a, before_a);
    compare(expected_a, planned(a, first, *x.tensors));
  }

  SECTION("tensors that do not fit are named") {
    const auto fails = [&](std::vector<at::Tensor> list, const std::string& slot) {
      CHECK_THROWS_WITH(bindings(x.step, list), Catch::Contains(slot));
    };
    auto list = announced;
    list.pop_back();
    fails(list, "there is no tensor");
    list = announced;
    list[0] = list[0].to(at::kDouble);
    fails(list, "slot 0 (parameter 0): the tensor has another type");
    list = announced;
    list[0] = list[0].transpose(0, 1).contiguous().transpose(0, 1);
    fails(list, "slot 0");
    list = announced;
    list[3] = list[2].detach();
    fails(list, "shares memory");
    CHECK_THROWS_AS(executor(plan, *prepare(b).tensors), broken_contract);
  }
}
