// SPDX-License-Identifier: Apache-2.0
// Schedules on several tiers that were worked out by hand, and each rule broken once.
#include <catch2/catch.hpp>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/any_solver.hpp>
#include <remat/core/bounds.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/store_all.hpp>

#include "../tiers.hpp"

using remat::any_tier;
using remat::problem;
using remat::schedule;
using remat::testing::device;
using remat::testing::disk;
using remat::testing::host;
using remat::testing::host_step;
using remat::testing::step_parts;

namespace {

/// The step at which the changed schedule breaks a rule, and the reason.
std::pair<std::size_t, std::string> step_fault(const problem& p, const std::function<void(schedule&)>& change) {
  auto s = host_step();
  change(s);
  try {
    remat::evaluate(p, s);
  } catch (const remat::bad_schedule& why) {
    return {why.step, why.what()};
  }
  return {0, "valid"};
}

/// Tiers device, host and disk, with links between device and host and between host and disk.
remat::memory_system three_tiers(std::optional<remat::bytes_t> host_budget = std::nullopt) {
  return {{{"device"}, {"host", host_budget}, {"disk"}},
          {{device, host, 10, 0, "up"}, {host, device, 10, 0, "down"}, {host, disk, 2, 1}, {disk, host, 2, 1}}};
}

}  // namespace

TEST_CASE("an optimizer on the host") {
  step_parts x;
  SECTION("a single step") {
    x.next = {};
    const auto e = remat::evaluate(x.build(), host_step());
    // w is there at 1, g at 5, and on the host at 6, where the update ends at 9.
    CHECK(e.ends == std::vector<double>{0, 5, 5, 5, 6, 9, 6});
    CHECK(e.seconds == 9);
    CHECK(e.memory == std::vector<remat::bytes_t>{10, 20, 10, 10, 0, 0, 0});
    CHECK(e.peaks == std::vector<remat::bytes_t>{20, 20});
    CHECK(e.peak == 20);
    CHECK(e.computed == 2);
    REQUIRE(e.copies.size() == 2);
    CHECK((e.copies[1].step == 3 && e.copies[1].begin == 5 && e.copies[1].end == 6));
  }
  SECTION("repeated steps in which the last updated weight is the first to be read") {
    const auto e = remat::evaluate(x.build(), host_step());
    CHECK(e.seconds == 9);
    CHECK(e.peaks == std::vector<remat::bytes_t>{20, 20});
    REQUIRE(e.copies.size() == 2);
    CHECK((e.copies[0].begin == 3 && e.copies[0].end == 4));  // it waits for the update of the step before
    CHECK(e.ends == std::vector<double>{0, 8, 8, 8, 9, 12, 9});
  }
  SECTION("repeated steps in which the next step reads another weight first hide the update") {
    x.values = {{.name = "w", .bytes = 10, .starts = host},
                {"g", 10},
                {.name = "w'", .bytes = 10, .ends = host},
                {"x", 10, true},
                {"y", 10}};
    x.operations = {{.name = "first", .inputs = {3}, .outputs = {4}, .seconds = 6},
                    {.name = "gradient", .inputs = {0, 4}, .outputs = {1}, .seconds = 4},
                    {.name = "adamw", .inputs = {0, 1}, .outputs = {2}, .seconds = 3, .on = host, .overwrites = {{2, 0}}}};
    schedule s;
    s.compute(0);
    s.prefetch(0);
    s.compute(1);
    s.drop(0);
    s.drop(4);
    s.offload(1);
    s.drop(1);
    s.compute(2);
    s.drop(1, host);
    CHECK(remat::evaluate(x.build(), s).seconds == 12);  // 6, the prefetch, 4, and the gradient's way out
  }
}

TEST_CASE("a queue that grows slowly is found, even if it does no harm for many steps") {
  // The host needs 11 s of work per step of 10 s, and the device reads the result 9.5 s after its step has begun.
  const remat::memory_system system{{}, {{device, host, 1e9}, {host, device, 1e9}}};
  const problem p("slow host",
                  {{.name = "w", .bytes = 0, .starts = host}, {"y", 0}, {"g", 0}, {.name = "w'", .bytes = 0, .ends = host}},
                  {{.name = "forward", .inputs = {}, .outputs = {1}, .seconds = 9.5},
                   {.name = "backward", .inputs = {0, 1}, .outputs = {2}, .seconds = 0.5},
                   {.name = "update", .inputs = {0, 2}, .outputs = {3}, .seconds = 11, .on = host, .overwrites = {{3, 0}}}},
                  {3}, std::nullopt, std::nullopt, system, {{3, 0}});
  schedule s;
  s.compute(0);
  s.prefetch(0);
  s.compute(1);
  s.drop(0);
  s.drop(1);
  s.offload(2);
  s.drop(2);
  s.compute(2);
  s.drop(2, host);
  CHECK(remat::evaluate(p, s).seconds == Approx(11.5));  // the update, and the copies it waits for
}

TEST_CASE("a copy to another tier waits until there is room, and nothing before it waits") {
  const problem p("disk", {{"a", 10}, {"b", 10}}, {}, {0, 1}, std::nullopt, std::nullopt, three_tiers(10));
  schedule s;
  s.copy(0, device, host);  // until 1
  s.copy(0, host, disk);    // until 7
  s.drop(0, host);
  s.copy(1, device, host);  // from 7
  auto e = remat::evaluate(p, s);
  CHECK(e.peaks == std::vector<remat::bytes_t>{20, 10, 10});
  REQUIRE(e.copies.size() == 3);
  CHECK((e.copies[1].begin == 1 && e.copies[1].end == 7 && e.copies[2].begin == 7));
  CHECK(e.seconds == 0);  // the targets never left the device
  s.drop(1);
  CHECK_THROWS_WITH(remat::evaluate(p, s), "target 1 is not on the device at the end");
  s.copy(1, host, device);
  e = remat::evaluate(p, s);
  CHECK(e.ends.back() == 8);
  CHECK(e.seconds == 9);
}

TEST_CASE("a computation on another tier needs its workspace until it ends") {
  auto make = [](remat::bytes_t workspace) {
    return problem("workspace", {{"a", 10}, {.name = "b", .bytes = 1, .starts = host}, {"c", 1}},
                   {{.name = "c", .inputs = {1}, .outputs = {2}, .seconds = 3, .workspace = workspace, .on = host}}, {0},
                   std::nullopt, std::nullopt, three_tiers());
  };
  schedule s;
  s.compute(0);
  s.copy(0, device, host);
  CHECK(remat::evaluate(make(5), s).copies[0].begin == 3);
  CHECK(remat::evaluate(make(5), s).peaks == std::vector<remat::bytes_t>{10, 12, 0});
  CHECK(remat::evaluate(make(0), s).copies[0].begin == 0);
  schedule again;
  again.compute(0);
  again.compute(0);
  again.copy(0, device, host);
  CHECK(remat::evaluate(make(0), again).copies[0].begin == 6);  // until then c is on the host twice
}

TEST_CASE("links of one stream share a queue") {
  auto system = three_tiers();
  const auto ends = [&] {
    const problem p("queue", {{"a", 10}, {.name = "b", .bytes = 10, .starts = host}}, {}, {0}, std::nullopt, std::nullopt,
                    system);
    schedule s;
    s.copy(0, device, host);
    s.copy(1, host, device);
    return remat::evaluate(p, s).copies[1].end;
  };
  CHECK(ends() == 1);
  system.links[0].stream = system.links[1].stream = "bus";
  CHECK(ends() == 2);
}

TEST_CASE("values that may start or end on any tier") {
  const problem p("any",
                  {{.name = "a", .bytes = 10, .held = true, .starts = any_tier}, {.name = "b", .bytes = 4, .ends = any_tier}},
                  {{.name = "b", .inputs = {0}, .outputs = {1}}}, {1}, std::nullopt, std::nullopt, three_tiers());
  CHECK(p.source_bytes() == 0);
  CHECK(p.held_bytes() == 0);
  CHECK(remat::bounds_without_search(p).budget == 14);
  const auto from = [&](std::vector<remat::start_place> starts, auto... steps) {
    return remat::evaluate(p, {{steps...}, std::move(starts)});
  };
  const remat::step down(remat::action::copy, 0, host, device), run(remat::action::compute, 0),
      up(remat::action::copy, 1, device, host), drop_b(remat::action::drop, 1), drop_a(remat::action::drop, 0),
      drop_a_there(remat::action::drop, 0, host);
  CHECK(from({{0, device}}, run).peaks == std::vector<remat::bytes_t>{14, 0, 0});
  CHECK(from({{0, host}}, down, run).seconds == 1);
  CHECK(from({{0, host}}, down, run, drop_a).peaks == std::vector<remat::bytes_t>{14, 10, 0});  // held on the host, copied here
  CHECK(from({{0, device}}, run, up, drop_b).seconds == Approx(0.4));
  CHECK(from({{0, device}}, run, up).seconds == 0);  // it is on the device all the time
  CHECK_THROWS_WITH(from({{0, device}}, run, drop_a), "step 1 (drop 0): a held value is dropped");
  CHECK_THROWS_WITH(from({{0, host}}, down, run, drop_a_there), "step 2 (drop 0): a held value is dropped");
  CHECK_THROWS_WITH(from({{0, device}}, run, drop_b), "target 1 is on no tier at the end");
  CHECK_THROWS_WITH(from({}, run), "starts: value 0 may start on any tier, and the schedule does not say on which");
  CHECK_THROWS_WITH(from({{2, device}}, run), "starts[0]: no value 2");
  CHECK_THROWS_WITH(from({{0, 3}}, run), "starts[0]: no such tier");
  CHECK_THROWS_WITH(from({{0, device}, {1, device}}, run), "starts[1]: value 1 is no source that may start on any tier");
  CHECK_THROWS_WITH(from({{0, device}, {0, host}}, run), "starts[1]: value 0 starts twice");
  CHECK_THROWS_WITH(remat::evaluate(problem(), {{}, {{0, host}}}), "starts[0]: no value 0");
}

TEST_CASE("each broken rule of several tiers names its step") {
  using pair = std::pair<std::size_t, std::string>;
  const auto p = step_parts{}.build();
  const auto steps = [](std::size_t at, remat::step x) { return [=](schedule& s) { s.steps[at] = x; }; };
  using remat::action;
  CHECK(step_fault(p, [](auto&) {}) == pair{0, "valid"});
  CHECK(step_fault(p, steps(1, {action::compute, 2})) == pair{1, "step 1 (compute 2): no such operation"});
  CHECK(step_fault(p, steps(0, {action::copy, 3, host, device})) == pair{0, "step 0 (copy 3): no such value"});
  CHECK(step_fault(p, steps(0, {action::copy, 0, disk, device})) == pair{0, "step 0 (copy 0): no such tier"});
  CHECK(step_fault(p, steps(0, {action::copy, 0, host, disk})) == pair{0, "step 0 (copy 0): no such tier"});
  CHECK(step_fault(p, steps(0, {action::drop, 0, disk})) == pair{0, "step 0 (drop 0): no such tier"});
  CHECK(step_fault(p, steps(0, {action::copy, 0, host, host})) == pair{0, "step 0 (copy 0): no link from the host to the host"});
  CHECK(step_fault(p, steps(0, {action::offload, 0})) == pair{0, "step 0 (offload 0): the value is not on the device"});
  CHECK(step_fault(p, steps(2, {action::prefetch, 0})) == pair{2, "step 2 (prefetch 0): the value is on the device"});
  CHECK(step_fault(p, steps(2, {action::offload, 0})) == pair{2, "step 2 (offload 0): the value is on the host"});
  CHECK(step_fault(p, steps(0, {action::drop, 1, host})) == pair{0, "step 0 (drop 1): the value is not on the host"});
  CHECK(step_fault(p, steps(0, {action::compute, 0})) == pair{0, "step 0 (compute 0): input 0 is not on the device"});
  CHECK(step_fault(p, steps(4, {action::drop, 1, host})) == pair{5, "step 5 (compute 1): input 1 is not on the host"});
  CHECK(step_fault(p, steps(6, {action::compute, 1})) ==
        pair{6, "step 6 (compute 1): an operation that overwrites its inputs is computed again"});
  CHECK(step_fault(p, [](auto& s) { s.steps.pop_back(); }) == pair{6, "value 1 is left on the host at the end of the step"});
  CHECK(step_fault(p, steps(4, {action::compute, 0})) == pair{4, "step 4 (compute 0): input 0 is not on the device"});
  CHECK(step_fault(p, [](auto& s) { s.steps.resize(5); }) == pair{5, "target 2 is not on the host at the end"});

  step_parts x;
  x.operations[0].once = true;
  CHECK(step_fault(x.build(), steps(2, {action::compute, 0})) ==
        pair{2, "step 2 (compute 0): a once-only operation is computed again"});
  x = {};
  x.system.tiers = {{"device"}, {"host", 19}};
  CHECK(step_fault(x.build(), [](auto&) {}) == pair{3, "step 3 (offload 1): the host needs 20 bytes, its budget is 19"});
  x.system.tiers[1].budget = 9;
  CHECK(step_fault(x.build(), [](auto&) {}) == pair{0, "before the first step: the host needs 10 bytes, its budget is 9"});
  x.system.tiers[1].budget = 20;
  CHECK(step_fault(x.build(), [](auto&) {}) == pair{0, "valid"});
  x = {};
  x.values[1].movable = false;
  CHECK(step_fault(x.build(), [](auto&) {}) == pair{3, "step 3 (offload 1): the value may not be copied"});
  x = {};
  x.copies.reset();
  x.system = {{{"device"}, {"memory"}}, {{host, device, 1}, {device, host, 1}}};
  CHECK(step_fault(x.build(), [](auto&) {}) == pair{0, "step 0 (prefetch 0): no tier beyond the device is called \"host\""});
  x = {};
  x.operations[1].overwrites = {};
  CHECK(step_fault(x.build(), [](auto&) {}) == pair{7, "value 0 is left on the host at the end of the step"});
  x.values[0].starts = x.values[2].ends = any_tier;
  x.values.push_back({.name = "y", .bytes = 1, .starts = host});
  CHECK(step_fault(x.build(), [](auto& s) {
          s.starts = {{0, host}};
          s.drop(0, host);
          s.drop(3, host);
        }) == pair{9, "value 3 is not on the host at the end, as the next step begins"});
}

TEST_CASE("solvers without support for tiers refuse them with a reason") {
  const auto p = step_parts{}.build();
  const auto r = remat::solve(p, 1000, remat::store_all{});
  CHECK(r.status == remat::status::not_applicable);
  CHECK(r.reason == "store_all plans for a device and copies to a host; the problem has next");
  CHECK(remat::solve(p, 1000, remat::any_solver(remat::store_all{})).status == remat::status::not_applicable);
  CHECK(remat::pareto_curve(p, {1000}, remat::any_solver(remat::store_all{}))[0].status == remat::status::not_applicable);
  CHECK(remat::solve(p, 1, remat::store_all{}).status == remat::status::infeasible);
  CHECK(remat::smallest_budget(p, remat::store_all{}).status == remat::status::not_applicable);
  for (const auto& point : remat::pareto_curve(p, remat::evenly{3}, remat::store_all{}))
    CHECK(point.status == remat::status::not_applicable);
  CHECK_THROWS_WITH(remat::evaluate_plain(p, host_step()), "next: beyond version 1 of the format, and not supported here");
  const problem plain("plain", {{"a", 1}}, {}, {0}, remat::copy_rates{1, 1, 0});
  schedule s;
  s.offload(0);
  s.drop(0, host);
  CHECK(remat::evaluate(plain, s).peaks == std::vector<remat::bytes_t>{1, 1});
  CHECK_THROWS_WITH(remat::evaluate_plain(plain, s), "step 1: it names a tier, which is not supported here");
  struct started : remat::store_all {
    bool begins = false;
    started with_start(const schedule&) const { return {{}, true}; }
    remat::result solve(const problem& q, remat::bytes_t budget, remat::monitor& m) const {
      REQUIRE_FALSE(begins);
      return remat::store_all::solve(q, budget, m);
    }
  };
  CHECK(remat::solve(problem("sources", {{"a", 1}}, {}, {}, remat::copy_rates{1, 1, 0}), 1, started{}, remat::start_from(s))
            .found());
  const auto known = remat::as_result(p, host_step());
  CHECK((known.found() && known.seconds == 9 && known.peaks == std::vector<remat::bytes_t>{20, 20}));

  struct knows : remat::store_all {
    bool plans_tiers() const { return true; }
    remat::result solve(const problem&, remat::bytes_t, remat::monitor&) const {
      remat::result found;
      found.status = remat::status::feasible;
      found.schedule = host_step();
      return found;
    }
  };
  for (const auto& answer : {remat::solve(p, 20, knows{}), remat::solve(p, 20, remat::any_solver(knows{}))}) {
    CHECK(answer.found());
    CHECK(answer.seconds == 9);
    CHECK(answer.bound == 4);
  }
  const auto curve = remat::pareto_curve(p, remat::evenly{3}, knows{});
  REQUIRE(curve.size() == 3);
  for (std::size_t i = 0; i < 3; ++i)
    CHECK((curve[i].budget == 30 - 5 * static_cast<remat::bytes_t>(i) && curve[i].seconds == 9));
}

TEST_CASE("measure_store_all counts everything as if it were on the device") {
  const auto all = remat::measure_store_all(step_parts{}.build());
  CHECK(all.peak == 30);
  CHECK(all.seconds == 4);  // the operation of the host does not count
  const problem plain("plain", {{"a", 1}, {"b", 2}}, {{"b", {0}, {1}, 3, 4}}, {1});
  CHECK((remat::measure_store_all(plain).peak == 7 && remat::measure_store_all(plain).seconds == 3));
}
