// SPDX-License-Identifier: Apache-2.0
// Values split into parts: any schedule for values is a schedule for their parts, and parts allow faster schedules.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/structure/split_values.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/tier_oracle.hpp>

#include "../tiers_walk.hpp"

using namespace remat;
using namespace remat::testing;

namespace {

/// The schedule that does to all parts of a value what `s` does to the value.
schedule in_parts(const schedule& s, const split_problem& parts) {
  schedule result;
  for (const auto& x : s.steps)
    if (x.what == action::compute)
      result.steps.push_back(x);
    else
      for (value_id v = 0; v < parts.whole.size(); ++v)
        if (parts.whole[v] == x.value()) result.steps.emplace_back(x.what, v, x.from, x.to);
  for (value_id v = 0; v < parts.whole.size(); ++v)
    for (const auto& [value, tier] : s.starts)
      if (parts.whole[v] == value) result.starts.push_back({v, tier});
  return result;
}

}  // namespace

TEST_CASE("split_values: a schedule for values is a schedule for their parts, with the same peak and time") {
  std::mt19937_64 g(7);
  int moved = 0;
  for (int round = 0; round < 200; ++round) {
    const auto p = random_problem(g, {.once = 20}).with_copies(copy_rates{2, 3, 0});
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    const auto r = solve(p, uniform(g, bounds_without_search(p).budget, all), offload_only());
    REQUIRE(r.found());
    const auto parts = split_values(p, uniform(g, 1, 9));
    CHECK(parts.problem.held_bytes() == p.held_bytes());
    CHECK(parts.problem.source_bytes() == p.source_bytes());
    CHECK(parts.problem.operations().size() == p.operations().size());
    std::vector<bytes_t> bytes(p.values().size());
    for (value_id v = 0; v < parts.whole.size(); ++v) bytes[parts.whole[v]] += parts.problem.values()[v].bytes;
    for (value_id v = 0; v < bytes.size(); ++v) CHECK(bytes[v] == p.values()[v].bytes);
    const auto same = evaluate(parts.problem, in_parts(r.schedule, parts));
    CHECK(same.peak == r.peak);
    CHECK(same.seconds == Approx(r.seconds));
    moved += has_copies(r.schedule);
  }
  CHECK(moved > 50);
}

TEST_CASE("split_values on several tiers with in-place updates and repeated steps: the same peak, no more time") {
  std::mt19937_64 g(9);
  int valid = 0, cyclic = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto p = random_tiers_problem(g);
    const auto s = tiers_walk(g, p).run();
    const auto whole = evaluated(p, s);
    if (!whole) continue;
    ++valid, cyclic += !p.next().empty();
    INFO("round " << round);
    const auto parts = split_values(p, uniform(g, 1, 6));
    const auto split = evaluate(parts.problem, in_parts(s, parts));
    CHECK(split.peak == whole->peak);
    const auto latency = [](const copy_link& l) { return l.latency > 0; };  // the copy of each part has its own latency
    if (std::none_of(p.links().begin(), p.links().end(), latency)) CHECK(split.seconds <= whole->seconds + 1e-9);
  }
  CAPTURE(valid, cyclic);
  CHECK(std::min(valid - cyclic, cyclic) > 100);
}

TEST_CASE("split_values: the optimum for parts is never slower, and often faster") {
  std::mt19937_64 g(8);
  int compared = 0, faster = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto p = random_problem(g, {.operations = 3, .sources = 1, .outputs = 1, .bytes = 6}).with_copies(copy_rates{1, 1, 0});
    const auto all = evaluate(p, store_all_schedule(p)).peak, least = bounds_without_search(p).budget;
    if (least == all) continue;
    const auto budget = uniform(g, least, all - 1);
    const auto parts = split_values(p, 3).problem;
    if (parts.values().size() > 12) continue;
    const auto whole = exhaustive_optimum_on_tiers(p, budget, 20'000), split = exhaustive_optimum_on_tiers(parts, budget, 20'000);
    if (!whole || !split) continue;
    REQUIRE(split->seconds <= whole->seconds + 1e-9);
    ++compared;
    faster += split->seconds < whole->seconds - 1e-9;
  }
  CAPTURE(compared, faster);
  CHECK(compared > 50);
  CHECK(faster > 5);
}

TEST_CASE("split_values splits in-place updates and the sources of the next step into matching parts") {
  const auto p = step_parts().build();
  REQUIRE(p.next().size() == 1);
  const auto parts = split_values(p, 4);
  const auto pieces = std::count(parts.whole.begin(), parts.whole.end(), p.next()[0].source);
  CHECK(pieces == (p.values()[p.next()[0].source].bytes + 3) / 4);
  REQUIRE(parts.problem.next().size() == static_cast<std::size_t>(pieces));
  for (const auto& [target, source] : parts.problem.next()) {
    CHECK(parts.whole[target] == p.next()[0].target);
    CHECK(parts.whole[source] == p.next()[0].source);
  }
  for (const auto& op : parts.problem.operations())
    for (const auto& [output, input] : op.overwrites)
      CHECK(parts.problem.values()[output].bytes == parts.problem.values()[input].bytes);
  CHECK((parts.problem.tiers().size() == p.tiers().size() && parts.problem.links().size() == p.links().size()));
  CHECK(evaluate(parts.problem, in_parts(host_step(), parts)).seconds == Approx(evaluate(p, host_step()).seconds));
}

TEST_CASE("split_values keeps held values whole") {
  const auto parts = split_values({"", {{"w", 8, true}, {"a", 8}, {"b", 6}}, {{"f", {0, 1}, {2}, 1}}, {2}}, 4);
  CHECK(parts.whole == std::vector<value_id>{0, 1, 1, 2, 2});
  CHECK(parts.problem.values().back().bytes == 2);
}

TEST_CASE("split_values refuses parts of zero bytes and too many parts") {
  const problem p("", {{"x", bytes_t{1} << 40}}, {}, {0});
  CHECK_THROWS_AS(split_values(p, 0), bad_option);
  CHECK_THROWS_WITH(split_values(p, 1), Catch::Contains("2^24"));
  CHECK(split_values(p, max_bytes).problem.values().size() == 1);
}
