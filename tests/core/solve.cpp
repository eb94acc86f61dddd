// SPDX-License-Identifier: Apache-2.0
// The contract of `solve` for any solver: observers, limits, judgement of the schedule.
#include <catch2/catch.hpp>

#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <remat/core/observers.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/testing/generators.hpp>

using remat::control;
using remat::problem;
using remat::progress;
using remat::result;
using remat::status;

namespace {

/// a -> b -> c, 10 bytes and 1 s each; store-all peaks at 20.
problem chain() {
  return problem("chain", {{"a", 10}, {"b", 10}, {"c", 10}},
                 {{.name = "a", .inputs = {}, .outputs = {0}, .seconds = 1},
                  {.name = "b", .inputs = {0}, .outputs = {1}, .seconds = 1},
                  {.name = "c", .inputs = {1}, .outputs = {2}, .seconds = 1}},
                 {2});
}

/// Reports `reports` times unless it is stopped, and returns the given result.
struct scripted {
  int reports = 0;
  result answer = {};
  int* polls = nullptr;
  std::string name() const { return "scripted"; }
  result solve(const problem&, remat::bytes_t, remat::monitor& m) const {
    for (int i = 0; i < reports && !m.stopped(); ++i) {
      m.report({.stage = std::to_string(i), .best = 10.0 - i});
      if (polls) ++*polls;
    }
    return answer;
  }
};

result with(const problem& p, status s) {
  result r;
  r.status = s;
  r.schedule = remat::store_all_schedule(p);
  return r;
}

}  // namespace

TEST_CASE("observers see every report in order, with the elapsed time") {
  std::string seen;
  double last = 0;
  remat::solve(
      chain(), 100, scripted{.reports = 3}, {},
      [&](const progress& p) {
        seen += "a" + p.stage;
        CHECK(p.elapsed >= last);
        CHECK(p.best == 10.0 - std::stoi(p.stage));
        last = p.elapsed;
      },
      [&](const progress& p) {
        seen += "b" + p.stage;
        return control::go_on;
      });
  CHECK(seen == "a0b0a1b1a2b2");
}

namespace {

/// Reports two schedules, of which the second needs less memory, and returns the second.
struct anytime {
  remat::schedule last;
  std::string name() const { return "anytime"; }
  result solve(const problem& p, remat::bytes_t, remat::monitor& m) const {
    remat::schedule first;
    for (remat::operation_id o = 0; o < p.operations().size(); ++o) first.compute(o);
    m.report({.stage = "first", .best = 99, .schedule = &first});  // with a wrong time
    m.report({.stage = "second", .best = 3, .schedule = &last});
    m.report({.stage = "no schedule", .best = 3});
    result r;
    r.status = status::feasible;
    r.schedule = remat::store_all_schedule(p);
    return r;
  }
};

}  // namespace

TEST_CASE("observers get the schedule of each report, with its evaluated time and peak") {
  const auto p = chain();
  std::vector<std::pair<double, remat::bytes_t>> seen;
  remat::solve(p, 100, anytime{remat::store_all_schedule(p)}, {}, [&](const progress& now) {
    if (!now.schedule) {
      CHECK(now.stage == "no schedule");
      return;
    }
    const auto e = remat::evaluate(p, *now.schedule);
    CHECK((now.best == e.seconds && now.peak == e.peak));
    seen.emplace_back(now.best, now.peak);
  });
  CHECK(seen == std::vector<std::pair<double, remat::bytes_t>>{{3, 30}, {3, 20}});
}

TEST_CASE("reporting an invalid schedule breaks the contract") {
  const auto p = chain();
  const auto watch = [](const progress&) {};
  CHECK_THROWS_WITH(remat::solve(p, 100, anytime{{}}, {}, watch), Catch::Contains("reports an invalid schedule"));
  CHECK_THROWS_WITH(remat::solve(p, 20, anytime{remat::store_all_schedule(p)}, {}, watch),
                    Catch::Contains("30 bytes") && Catch::Contains("20"));
}

TEST_CASE("a stop by any observer ends the search, and the other observers still get the report") {
  int polls = 0, told = 0;
  const auto r = remat::solve(
      chain(), 100, scripted{.reports = 10, .polls = &polls}, {},
      [](const progress& p) { return p.stage == "2" ? control::stop : control::go_on; }, [&](const progress&) { ++told; });
  CHECK(polls == 3);
  CHECK(told == 3);
  CHECK(r.status == status::time_limit);
  CHECK_FALSE(r.found());
}

TEST_CASE("with a time limit of zero a solver does nothing") {
  int polls = 0;
  remat::solve(chain(), 100, scripted{.reports = 10, .polls = &polls}, {.seconds = 0});
  CHECK(polls == 0);
}

TEST_CASE("a solver that ends without a schedule gives a status and a reason") {
  const auto p = chain();
  CHECK(remat::solve(p, 100, scripted{}).status == status::not_found);
  CHECK(remat::solve(p, 100, scripted{}, {.seconds = 0}).status == status::time_limit);
  result answer;
  answer.reason = "all of one schedule";
  CHECK(remat::solve(p, 100, scripted{.answer = answer}, {.seconds = 0}).status == status::not_found);
  answer.status = status::not_applicable;
  const auto r = remat::solve(p, 100, scripted{.answer = answer}, {.seconds = 0});
  CHECK(r.status == status::not_applicable);
  CHECK(r.reason == "all of one schedule");

  const problem skip("skip", {{"a", 10}, {"b", 20}, {"c", 1}, {"d", 1}},
                     {{"a", {}, {0}, 1}, {"b", {0}, {1}, 1}, {"c", {1}, {2}, 1}, {"d", {0, 2}, {3}, 1}}, {3});
  CHECK(remat::solve(skip, 31, remat::store_all{}).reason.empty());
  const auto stored = remat::solve(skip, 30, remat::store_all{}, {.seconds = 0});
  CHECK(stored.status == status::not_found);
  CHECK(stored.reason == "store-all needs 31 bytes");
}

TEST_CASE("the numbers of a result come from evaluate") {
  const auto p = chain();
  auto answer = with(p, status::feasible);
  answer.peak = 1;
  answer.seconds = 0.5;
  answer.recomputed = 9;
  const auto r = remat::solve(p, 20, scripted{.answer = answer});
  CHECK(r.peak == 20);
  CHECK(r.seconds == 3);
  CHECK(r.recomputed == 0);
  CHECK(r.budget == 20);
  CHECK(r.solver == "scripted");
  CHECK(r.smallest_budget == 20);
  CHECK(r.bound == 3);  // the seconds of all needed operations
  CHECK(r.status == status::optimal);
}

TEST_CASE("a bound that contradicts the returned schedule or the start schedule is a broken contract") {
  const auto p = chain();  // takes 3 s, and 20 bytes
  auto slow = with(p, status::feasible), large = slow;
  slow.bound = 3.1;
  large.budget_bound = 21;
  for (const auto& liar : {slow, large}) {
    CHECK_THROWS_AS(remat::solve(p, 100, scripted{.answer = liar}), remat::broken_contract);
    auto silent = liar;
    silent.status = status::not_found;
    CHECK_THROWS_AS(remat::solve(p, 100, scripted{.answer = silent}, remat::start_from(remat::store_all_schedule(p))),
                    remat::broken_contract);
  }
  CHECK_THROWS_WITH(remat::solve(p, 100, scripted{.answer = slow}), Catch::Contains("scripted") && Catch::Contains("3.1"));
  slow.bound = 3 * (1 + 1e-12);  // within rounding
  CHECK(remat::solve(p, 100, scripted{.answer = slow}).status == status::optimal);
  const auto layers = remat::testing::unit_training_chain(5);
  large.status = status::not_found;
  large.budget_bound = remat::measure_store_all(layers).peak + 1;
  CHECK_THROWS_AS(remat::smallest_budget(layers, scripted{.answer = large}), remat::broken_contract);
}

TEST_CASE("one stop_at can be used for several searches") {
  const auto p = chain();
  int polls = 0;
  const scripted s{.reports = 5, .answer = with(p, status::feasible), .polls = &polls};
  const remat::stop_at when{.seconds = 8, .patience = 1e9};  // stops at the third report, of 8 s
  for (int search = 1; search <= 3; ++search) {
    remat::solve(p, 100, s, {}, when);
    CHECK(polls == 3 * search);
  }
}

TEST_CASE("a monitor knows the time since the last improvement, and resets it on restart") {
  std::vector<double> idle;
  remat::monitor m({}, [&](const progress& now) {
    idle.push_back(now.idle);
    return control::go_on;
  });
  const auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(5)); };
  m.report({.stage = "", .best = 5});
  wait();
  m.report({.stage = "", .best = 6});
  m.report({.stage = "", .best = 4});
  wait();
  m.restart();
  m.report({.stage = "", .best = 9});
  CHECK(idle[0] == 0);
  CHECK(idle[1] > 0.004);
  CHECK(idle[2] == 0);
  CHECK(idle[3] == 0);
}

TEST_CASE("an invalid schedule and a schedule over the budget break the contract") {
  const auto p = chain();
  auto invalid = with(p, status::feasible);
  invalid.schedule.steps.pop_back();
  invalid.schedule.steps.erase(invalid.schedule.steps.begin());
  CHECK_THROWS_AS(remat::solve(p, 100, scripted{.answer = invalid}), remat::broken_contract);
  // Over the budget: 20 bytes are possible, but this schedule keeps everything.
  auto greedy = with(p, status::optimal);
  greedy.schedule.steps = {{remat::action::compute, 0}, {remat::action::compute, 1}, {remat::action::compute, 2}};
  CHECK_THROWS_WITH(remat::solve(p, 20, scripted{.answer = greedy}), Catch::Contains("30 bytes") && Catch::Contains("20"));
}

TEST_CASE("a budget is infeasible by the bound without search, or by a proof of the solver") {
  const auto p = chain();
  int polls = 0;
  auto r = remat::solve(p, 19, scripted{.reports = 1, .answer = with(p, status::feasible), .polls = &polls});
  CHECK(r.status == status::infeasible);
  CHECK(r.budget_bound == 20);
  CHECK(r.schedule.steps.empty());
  CHECK(r.gap() == 1);
  CHECK(polls == 0);
  r = remat::solve(p, 50, scripted{.answer = with(p, status::infeasible)});
  CHECK(r.status == status::infeasible);
  CHECK(r.budget_bound == 51);
  CHECK(r.schedule.steps.empty());
  constexpr auto largest = std::numeric_limits<remat::bytes_t>::max();
  r = remat::solve(p, largest, scripted{.answer = with(p, status::infeasible)});
  CHECK(r.budget == largest);
  CHECK(r.budget_bound == largest);
}

TEST_CASE("solve names options that are out of range") {
  const auto p = chain();
  const scripted s;
  CHECK_THROWS_WITH(remat::solve(p, -1, s), Catch::Contains("budget") && Catch::Contains("-1"));
  CHECK_THROWS_AS(remat::solve(p, -1, s), remat::bad_option);
  CHECK_THROWS_WITH(remat::solve(p, 1, s, {.seconds = -1}), Catch::Contains("limits.seconds"));
  CHECK_THROWS_WITH(remat::solve(p, 1, s, {.seconds = std::nan("")}), Catch::Contains("limits.seconds"));
  CHECK_THROWS_WITH(remat::solve(p, 1, s, {.threads = 0}), Catch::Contains("limits.threads"));
  CHECK_THROWS_WITH(remat::solve(p, 1, s, {.threads = 100'000}), Catch::Contains("limits.threads") && Catch::Contains("1024"));
  CHECK_THROWS_WITH(remat::solve(p, 1, s, {.gap = 1}), Catch::Contains("limits.gap"));
}

TEST_CASE("solve is re-entrant: several threads share one problem and one solver") {
  const auto p = chain();
  const scripted s{.reports = 100, .answer = with(p, status::feasible)};
  std::vector<result> results(4);
  std::vector<int> events(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] { results[t] = remat::solve(p, 20, s, {}, [&](const progress&) { ++events[t]; }); });
  for (auto& t : threads) t.join();
  for (std::size_t t = 0; t < 4; ++t) {
    CHECK(results[t].schedule == results[0].schedule);
    CHECK(events[t] == 100);
  }
}
