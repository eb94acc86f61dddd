// SPDX-License-Identifier: Apache-2.0
// The executor with fetched weights, gradients that leave, and replicas.
#include <torch/torch.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <limits>
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

namespace {

/// Counts its copies, and on demand copies wrong bytes.
class counting_link final : public remat::pytorch::link {
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

TEST_CASE("steps with fetched weights have the results of eager mode bit by bit") {
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
      const auto change = [&] {  // imitates an optimizer
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
      if (const auto laid = copies::schedule_copies(p, needed_operations(p), least + (held.held_bytes() - p.held_bytes()) / 2))
        schedules.push_back(laid->schedule);
      schedules.push_back(schedules[1]);  // with explicit tiers, as solvers for several tiers may write schedules
      for (auto& at : schedules.back().steps) at = remat::detail::with_tiers(p, at);
      for (index_t v = 0; v < can.size(); ++v)  // drops on the tier where the value starts, which is memory of the caller
        if (can[v]) schedules.back().drop(v, p.host());
      CHECK_NOTHROW(evaluate(p, schedules.back()));
      for (const auto& plan : schedules) {
        INFO(s.name << " " << where);
        const auto e_plan = std::make_shared<execution_plan>(x.step, plan, x.profiles, first_layout);
        const auto far_link = std::make_shared<counting_link>();
        far_memory far = {host_memory("far", e_plan->far_bytes()), std::make_unique<late_link>(1), far_link, {}};
        if (e_plan->moved_bytes().first == 0 && e_plan->far_bytes() == 0) far.memory.reset();
        executor e(e_plan, *x.tensors, device_of(test_device()), far);
        begin_again();
        compare(expected[0], planned(s, e, *x.tensors));
        change();
        compare(expected[1], planned(s, e, *x.tensors));
        CHECK(e.unplanned_allocations() == 0);
        CHECK(e_plan->fetched_bytes() > 0);
        bytes_t weight_bytes = 0;
        for (index_t v = 0; v < can.size(); ++v) weight_bytes += can[v] ? x.step->values[v].bytes : 0;
        twice += e_plan->fetched_bytes() > weight_bytes;
        together += e_plan->moved_bytes().second > 0;
        CHECK(far_link->bytes == 2 * (e_plan->fetched_bytes() + e_plan->moved_bytes().second));
        if (e_plan->moved_bytes().second > 0) continue;
        far_link->wrong = true;  // the wrong bytes must change the results
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

TEST_CASE("gradients are given away once no operation reads their parameters") {
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
    const auto given = has_early_gradient(*x.step);
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
      executor e(std::make_shared<execution_plan>(x.step, plan, x.profiles, first_layout), *x.tensors);
      for (const int held : {0, 1, 2}) {  // gradients are held by nobody, by the caller, or by the step until it ends
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
          gradient.fill_(7);  // the receiver may write to it
          return at::Tensor();
        };
        for (const auto& o : expected) {
          const auto now = planned(s, e, *x.tensors, take, taken);
          whole_again();
          compare(o, now);
          if (held == 0) CHECK(e.gradients_still_held() == 0);
          if (held != 0)
            CHECK(e.gradients_still_held() == static_cast<std::size_t>(std::count(given.begin(), given.end(), true)));
          CHECK_FALSE(e.arena_in_use());
          for (const auto& g : kept) {
            CHECK_FALSE(e.owns(g));
            CHECK(g.eq(7).all().item<bool>());
          }
        }
        CHECK(e.unplanned_allocations() == 0);
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

  SECTION("the error for a tensor that does not fit names the slot") {
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
