// SPDX-License-Identifier: Apache-2.0
// Peak and time of schedules that were worked out by hand, and each rule of the execution model broken once.
#include <catch2/catch.hpp>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/testing/generators.hpp>

using remat::action;
using remat::problem;
using remat::schedule;

namespace {

constexpr auto compute = action::compute;
constexpr auto drop = action::drop;
constexpr auto offload = action::offload;
constexpr auto prefetch = action::prefetch;

/// x (held, 10) -> a (20, 1 s) -> b (30, 2 s, workspace 5) -> c (40, 4 s, reads a and b); target c.
problem diamond(std::optional<remat::copy_rates> copies = std::nullopt, bool once = false) {
  return problem("diamond", {{"x", 10, true}, {"a", 20}, {"b", 30}, {"c", 40}},
                 {{.name = "a", .inputs = {0}, .outputs = {1}, .seconds = 1, .once = once},
                  {.name = "b", .inputs = {1}, .outputs = {2}, .seconds = 2, .workspace = 5},
                  {.name = "c", .inputs = {1, 2}, .outputs = {3}, .seconds = 4}},
                 {3}, copies);
}

/// The step at which `s` breaks a rule, and the reason.
std::pair<std::size_t, std::string> fault(const problem& p, const schedule& s) {
  try {
    remat::evaluate(p, s);
  } catch (const remat::bad_schedule& why) {
    return {why.step, why.what()};
  }
  return {0, "valid"};
}

}  // namespace

TEST_CASE("evaluate: the schedule store-all") {
  const auto p = diamond();
  const auto s = remat::store_all_schedule(p);
  CHECK(s.steps == std::vector<remat::step>{{compute, 0}, {compute, 1}, {compute, 2}, {drop, 1}, {drop, 2}});
  const auto e = remat::evaluate(p, s);
  CHECK(e.peak == 100);
  CHECK(e.seconds == 7);
  CHECK(e.computed == 3);
  CHECK(e.recomputed == 0);
  CHECK(e.memory == std::vector<remat::bytes_t>{30, 65, 100, 80, 50});
  CHECK(e.ends == std::vector<double>{1, 3, 7, 7, 7});
}

TEST_CASE("evaluate: while an operation runs, its workspace and all of its outputs count, even outputs already on the device") {
  const problem p("two outputs", {{"u", 8}, {"w", 16}},
                  {{.name = "f", .inputs = {}, .outputs = {0, 1}, .seconds = 1, .workspace = 4}}, {0, 1});
  const auto e = remat::evaluate(p, {{{compute, 0}, {drop, 1}, {compute, 0}}});
  CHECK(e.memory == std::vector<remat::bytes_t>{28, 8, 36});  // 8 on the device + 24 for the new outputs + 4
  CHECK(e.peak == 36);
  CHECK(e.recomputed == 1);
  CHECK(e.seconds == 2);
}

TEST_CASE("evaluate: a source that is not held counts until it is dropped") {
  const problem p("source", {{"x", 100}, {"y", 1}}, {{.name = "y", .inputs = {0}, .outputs = {1}, .seconds = 1}}, {1});
  CHECK(remat::evaluate(p, {{{compute, 0}, {drop, 0}}}).memory == std::vector<remat::bytes_t>{101, 1});
  CHECK(fault(p, {{{drop, 0}, {compute, 0}}}).first == 1);
}

TEST_CASE("evaluate: problems without operations") {
  CHECK(remat::evaluate(problem(), {}).peak == 0);
  CHECK(remat::evaluate(problem(), remat::store_all_schedule(problem())).seconds == 0);
  const problem sources("sources", {{"held", 8, true}, {"other", 4}}, {}, {0});
  CHECK(remat::evaluate(sources, {}).peak == 12);  // before the first step
  CHECK(remat::store_all_schedule(sources).steps == std::vector<remat::step>{{drop, 1}});
  CHECK(remat::evaluate(sources, {{{drop, 1}}}).memory == std::vector<remat::bytes_t>{8});
  CHECK(fault(problem("missing", {{"a", 4}}, {{.name = "a", .inputs = {}, .outputs = {0}, .seconds = 1}}, {0}), {}).first == 0);
}

TEST_CASE("evaluate: copies") {
  // 10 bytes/s to the host, 20 bytes/s to the device, 0.5 s latency each.
  const auto p = diamond(remat::copy_rates{.to_host = 10, .to_device = 20, .latency = 0.5});

  SECTION("a copy runs beside computations, and a drop waits for the copy") {
    // a ends at 1; its copy takes 0.5 + 2 s until 3.5; b ends at 3; the drop waits until 3.5.
    const auto e = remat::evaluate(p, {{{compute, 0}, {offload, 1}, {compute, 1}, {drop, 1}, {prefetch, 1}, {compute, 2}}});
    CHECK(e.ends == std::vector<double>{1, 1, 3, 3.5, 3.5, 9});  // prefetch 0.5 + 1 s until 5, then c
    CHECK(e.memory == std::vector<remat::bytes_t>{30, 30, 65, 40, 60, 100});
    CHECK(e.seconds == 9);
  }
  SECTION("a prefetch waits for the offload of its value") {
    const auto q = problem("wait", {{"s", 100}, {"t", 1}}, {{.name = "t", .inputs = {0}, .outputs = {1}, .seconds = 1}}, {0, 1},
                           remat::copy_rates{.to_host = 100, .to_device = 50, .latency = 0});
    CHECK(remat::evaluate(q, {{{offload, 0}, {compute, 0}, {drop, 0}, {prefetch, 0}}}).seconds == 3);
    // The target arrives at 3 and the makespan includes it.
  }
  SECTION("copies in one direction run one after another") {
    const auto e =
        remat::evaluate(p, {{{compute, 0}, {compute, 1}, {offload, 1}, {offload, 2}, {drop, 2}, {compute, 1}, {compute, 2}}});
    CHECK(e.ends[4] == Approx(3 + 2.5 + 3.5));
  }
  SECTION("an input that is recomputed during its prefetch is available at once") {
    const auto e =
        remat::evaluate(p, {{{compute, 0}, {offload, 1}, {drop, 1}, {prefetch, 1}, {compute, 0}, {compute, 1}, {compute, 2}}});
    CHECK(e.ends[4] == 4.5);
    CHECK(e.seconds == 10.5);
  }
  SECTION("a value in flight is dropped only after it arrives") {
    const auto e = remat::evaluate(
        p, {{{compute, 0}, {offload, 1}, {drop, 1}, {prefetch, 1}, {drop, 1}, {compute, 0}, {compute, 1}, {compute, 2}}});
    CHECK(e.ends[4] == 5);
  }
}

TEST_CASE("evaluate: each broken rule names its step") {
  const auto p = diamond(remat::copy_rates{.to_host = 10, .to_device = 20, .latency = 0});
  using pair = std::pair<std::size_t, std::string>;
  CHECK(fault(p, {{{compute, 0}, {compute, 7}}}) == pair{1, "step 1 (compute 7): no such operation"});
  CHECK(fault(p, {{{drop, 4}}}) == pair{0, "step 0 (drop 4): no such value"});
  CHECK(fault(p, {{{compute, 1}}}) == pair{0, "step 0 (compute 1): input 1 is not on the device"});
  CHECK(fault(p, {{{compute, 0}, {drop, 2}}}) == pair{1, "step 1 (drop 2): the value is not on the device"});
  CHECK(fault(p, {{{drop, 0}}}) == pair{0, "step 0 (drop 0): a held value is dropped"});
  CHECK(fault(p, {{{offload, 1}}}) == pair{0, "step 0 (offload 1): the value is not on the device"});
  CHECK(fault(p, {{{prefetch, 1}}}) == pair{0, "step 0 (prefetch 1): no copy on the host"});
  CHECK(fault(p, {{{offload, 0}, {prefetch, 0}}}) == pair{1, "step 1 (prefetch 0): the value is on the device"});
  CHECK(fault(p, {{{compute, 0}}}) == pair{1, "target 3 is not on the device at the end"});
  CHECK(fault(diamond(), {{{offload, 0}}}) == pair{0, "step 0 (offload 0): the problem allows no copies"});
  CHECK(fault(diamond(std::nullopt, true), {{{compute, 0}, {compute, 0}}}) ==
        pair{1, "step 1 (compute 0): a once-only operation is computed again"});
}

TEST_CASE("with_drops keeps exactly the values that are used later") {
  std::mt19937_64 g(7);
  for (int round = 0; round < 300; ++round) {
    const auto p = remat::testing::random_problem(g, {.operations = 6, .sources = 3});
    std::vector<remat::operation_id> order;
    for (remat::operation_id o = 0; o < p.operations().size(); ++o) {
      for (remat::operation_id again = 0; again < o; ++again)
        if (remat::testing::chance(g, 30)) order.push_back(again);
      order.push_back(o);
    }
    const auto s = remat::with_drops(p, order);
    REQUIRE(remat::compute_order(s) == order);
    const auto e = remat::evaluate(p, s);

    const auto contains = [](const std::vector<remat::value_id>& all, remat::value_id v) {
      return std::find(all.begin(), all.end(), v) != all.end();
    };
    const auto wanted_after = [&](remat::value_id v, std::size_t k) {  // by its next read, its next computation, or at the end
      for (++k; k < order.size(); ++k) {
        if (contains(p.operations()[order[k]].inputs, v)) return true;
        if (p.producer(v) == order[k]) return false;
      }
      return p.is_target(v);
    };
    std::vector<bool> made(p.values().size());
    for (remat::value_id v = 0; v < made.size(); ++v) made[v] = p.is_source(v);
    std::size_t step = 0;
    for (std::size_t k = 0; k < order.size(); ++k, ++step) {
      while (s.steps[step].what != compute) ++step;
      const auto& op = p.operations()[order[k]];
      auto expected = op.workspace;
      for (remat::value_id v = 0; v < made.size(); ++v) {
        const bool written = p.producer(v) == order[k];
        if (written || (made[v] && (p.values()[v].held || contains(op.inputs, v) || wanted_after(v, k))))
          expected += p.values()[v].bytes;
        if (written) made[v] = true;
      }
      REQUIRE(e.memory[step] == expected);
    }
  }
}
