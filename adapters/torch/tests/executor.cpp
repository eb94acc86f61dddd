// SPDX-License-Identifier: Apache-2.0
// The executor runs schedules with the results of eager mode.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <filesystem>
#include <remat/copies/schedule_copies.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/evaluate_tiers.hpp>
#include <remat/pytorch/capture.hpp>
#include <remat/pytorch/disk.hpp>
#include <remat/pytorch/executor.hpp>
#include <remat/pytorch/memory.hpp>
#include <remat/pytorch/offload.hpp>

#include "compare.hpp"
#include "models.hpp"
#include "random_schedules.hpp"

using namespace executor_tests;

TEST_CASE("schedules have the results of eager mode bit by bit, without unplanned allocations", "[device]") {
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
      CHECK(e.unplanned_allocations() == 0);
      CHECK_FALSE(e.in_flight());
      CHECK(e.plan().arena_bytes() >= e.plan().live_peak());
    }
    CHECK(execution_plan(x.step, schedules[1], x.profiles).recomputed() > 0);
  }
}

TEST_CASE("with the allocator of the device, buffers return to it when they die", "[device]") {
  const hardware::option late("late", 20);
  const meter counting;
  ::torch::manual_seed(3);
  auto& on = device_of(test_device());
  for (const auto& s : models::all()) {
    INFO(s.name);
    const auto x = prepare(s);
    const auto buffers = copies_of(s.module->buffers());
    std::vector<schedule> schedules = {store_all_schedule(x.p), recompute_all(x.p, x.step->loss)};
    for (unsigned seed = 0; seed < 3; ++seed) schedules.push_back(random_schedule(x.p, seed, 0.3));
    restore(s, buffers);
    const auto expected = eager(s);
    for (const auto& schedule : schedules) {
      const auto plan = std::make_shared<execution_plan>(x.step, schedule, x.profiles, first_layout, 0, placing::by_allocator);
      CHECK_FALSE(plan->placed());
      CHECK(plan->arena_bytes() <= execution_plan(x.step, schedule, x.profiles, first_layout).arena_bytes());
      executor e(plan, *x.tensors, on);
      for (int step = 0; step < 2; ++step) {
        restore(s, buffers);
        const auto before = on.use().live;
        on.reset_peak();
        auto outputs = e.forward(s.inputs);
        CHECK(on.use().peak - before <= plan->needed_bytes());
        CHECK(on.use().live - before <= plan->held_bytes());
        compare(expected, finished(s, e, outputs, *x.tensors));
        outputs.clear();
        CHECK(on.use().live == before);
      }
      CHECK(e.unplanned_allocations() == 0);
      CHECK(e.arena_in_use() == false);
      REQUIRE(hardware::races() == "");
    }
    const auto copying = to_problem(*x.step, x.profiles.seconds(), x.profiles.workspace(), s.name, copy_rates{1, 1, 0});
    const auto moves = with_random_copies(copying, store_all_schedule(copying), 2);
    if (has_copies(moves))
      CHECK_THROWS_AS(execution_plan(x.step, moves, x.profiles, first_layout, 0, placing::by_allocator), bad_schedule);
  }
}

TEST_CASE("steps in flight share their working memory", "[device]") {
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
      const auto plan = std::make_shared<execution_plan>(x.step, schedule, x.profiles, first_layout, 0, placing::zones);
      CHECK(plan->held_bytes() >= plan->arena_bytes());
      held += plan->held_bytes();
      all += plan->needed_bytes();
      const auto shared = std::make_shared<working_memory>(on.memory());
      const auto overwrite = [&] {  // the memory holds nothing between the computations
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
      CHECK(first.unplanned_allocations() + second.unplanned_allocations() == 0);
    }
    const auto plan = std::make_shared<execution_plan>(x.step, schedules[0], x.profiles, first_layout, 0, placing::zones);
    if (plan->working_bytes() > 0) CHECK_THROWS_AS(executor(plan, *x.tensors, on), broken_contract);
  }
  CHECK(3 * held < 2 * all);
}

TEST_CASE("a step has ended as soon as another thread may begin one, and not earlier") {
  ::torch::manual_seed(3);
  auto& on = device_of(test_device());
  const auto s = models::mlp(8, 32, 4, 0);
  const auto x = prepare(s);
  const auto all = store_all_schedule(x.p);
  const auto plan = std::make_shared<execution_plan>(x.step, all, x.profiles, layout_options(), 0, placing::zones);
  REQUIRE(plan->working_bytes() > 0);
  const auto expected = eager(s);
  const auto shared = std::make_shared<working_memory>(on.memory());
  executor e(plan, *x.tensors, on, {}, {.working = shared});
  for (int step = 0; step < 1000; ++step) {
    const auto first = e.forward(s.inputs);
    outcome of_first;
    std::thread other([&] { of_first = finished(s, e, first, *x.tensors); });
    while (e.in_flight()) {  // a busy loop: the rest of the work of the other thread takes less than a microsecond
    }
    const auto second = e.forward(s.inputs);
    other.join();
    compare(expected, of_first);
    compare(expected, finished(s, e, second, *x.tensors));
    REQUIRE(shared->bytes() == plan->working_bytes());
  }
}

TEST_CASE("captured steps have the results of eager mode bit by bit, at fixed addresses", "[device][accelerator]") {
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
    const auto change = [&] {  // imitates an optimizer and a data loader
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
      const auto plan = std::make_shared<execution_plan>(x.step, schedule, x.profiles, first_layout, 0, placing::fixed);
      executor e(plan, *x.tensors, on, on_host(test_device(), plan->far_bytes()), {.graphs = true});
      begin_again();
      for (int k = 0; k < steps; ++k, change()) compare(expected[static_cast<std::size_t>(k)], planned(s, e, *x.tensors));
      same_inputs();
      INFO(e.not_captured());
      CHECK((e.not_captured().empty() || e.not_captured() == plan->why_addresses_move()));
      (e.not_captured().empty() ? captured : refused) += 1;
      CHECK(e.unplanned_allocations() == 0);
      REQUIRE(hardware::races() == "");
    }
  }
  CHECK(captured > 4 * refused);
}

TEST_CASE("values that are offloaded have the results of eager mode bit by bit", "[device]") {
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
      if (const auto laid = copies::schedule_copies(p, needed, least + static_cast<bytes_t>(part * most)))
        schedules.push_back(laid->schedule);
    }
    for (const auto& plan : schedules)
      for (const auto& where : places) {
        INFO(s.name << " " << where << ", schedule " << &plan - schedules.data());
        const bool disk = where == "on disk", streams = where == "on streams";
        const auto e_plan =
            std::make_shared<execution_plan>(x.step, plan, x.profiles, layout_options{.alignment = disk ? 4096 : 64, .tries = 0});
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
        CHECK(e.unplanned_allocations() == 0);
        CHECK_FALSE(e.arena_in_use());
        REQUIRE(hardware::races() == "");
        moves += e_plan->moved_bytes().second > 0;
        if (e_plan->moved_bytes().first > 0)
          CHECK_THROWS_AS(executor(e_plan, *x.tensors, device_of(test_device())), broken_contract);
      }
  }
  CHECK(moves > 3 * places.size() * models::all().size());
}

TEST_CASE("a step on a failed device throws and ends, and the next step on the working device is correct", "[accelerator]") {
  if (!hardware::emulated()) return;  // a real device does not recover from a failure
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
