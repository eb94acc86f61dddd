// SPDX-License-Identifier: Apache-2.0
// The contract of `pareto_curve` for any solver: order, sharing between points, limits and observers.
#include <catch2/catch.hpp>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/pareto_curve.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

using remat::bytes_t;
using remat::control;
using remat::problem;
using remat::result;
using remat::status;

namespace {

/// x -> a -> b -> c, and c also reads x. 10 bytes each except for c, 1 s each. Store-all peaks at 30 bytes; 20 are enough if x is
/// computed twice.
problem skip() {
  return problem("skip", {{"x", 10}, {"a", 10}, {"b", 10}, {"c", 0}},
                 {{.name = "x", .inputs = {}, .outputs = {0}, .seconds = 1},
                  {.name = "a", .inputs = {0}, .outputs = {1}, .seconds = 1},
                  {.name = "b", .inputs = {1}, .outputs = {2}, .seconds = 1},
                  {.name = "c", .inputs = {0, 2}, .outputs = {3}, .seconds = 1}},
                 {3});
}

const std::vector<remat::operation_id> twice = {0, 1, 2, 0, 3};

/// Answers with the given function, and counts the calls.
struct scripted_search {
  std::function<result(bytes_t)> answer;
  int* calls;
  std::string name() const { return "scripted_search"; }
  result solve(const problem&, bytes_t budget, remat::monitor& m) const {
    ++*calls;
    m.report({.stage = "working"});
    return answer(budget);
  }
};

/// `scripted_search` that answers all budgets in one call.
struct sweeping : scripted_search {
  std::vector<bytes_t>* seen;
  std::vector<result> sweep(const problem&, std::span<const bytes_t> budgets, remat::monitor&) const {
    seen->assign(budgets.begin(), budgets.end());
    std::vector<result> all;
    for (auto b : budgets) all.push_back(answer(b));
    return all;
  }
};

/// Finds only the schedule that it starts with.
struct start_keeper {
  std::optional<remat::schedule> start = {};
  std::string name() const { return "start_keeper"; }
  start_keeper with_start(remat::schedule s) const { return {std::move(s)}; }
  result solve(const problem& p, bytes_t budget, remat::monitor&) const {
    return start && remat::evaluate(p, *start).peak <= budget ? remat::as_result(p, *start) : result{};
  }
};

result found(const problem& p, const std::vector<remat::operation_id>& order) {
  result r;
  r.status = status::feasible;
  r.schedule = remat::with_drops(p, order);
  return r;
}

std::vector<bytes_t> budgets_of(const std::vector<result>& curve) {
  std::vector<bytes_t> all;
  for (const auto& r : curve) all.push_back(r.budget);
  return all;
}

}  // namespace

static_assert(remat::sweeping_solver<sweeping> && !remat::sweeping_solver<scripted_search>);
static_assert(remat::curve_observer<decltype([](const result&) {})> && !remat::curve_observer<decltype([](int) {})>);

TEST_CASE("a curve is sorted by falling budget without duplicates, and impossible budgets are not solved") {
  const auto p = skip();
  int calls = 0;
  const scripted_search s{[&](bytes_t) { return result{}; }, &calls};
  const auto curve = remat::pareto_curve(p, {10, 40, 25, 19, 40, 0}, s);
  CHECK(budgets_of(curve) == std::vector<bytes_t>{40, 25, 19, 10, 0});
  CHECK(calls == 2);  // below 20 bytes c cannot run
  CHECK(curve[0].status == status::not_found);
  CHECK(curve[2].status == status::infeasible);
  CHECK(curve[2].budget_bound == 20);
  CHECK(curve[4].schedule.steps.empty());
  CHECK(remat::pareto_curve(p, std::vector<bytes_t>{}, s).empty());
}

TEST_CASE("a schedule counts for all budgets that it fits, a bound for all smaller budgets") {
  const auto p = skip();
  int calls = 0;
  const scripted_search s{[&](bytes_t budget) {
                            if (budget == 50) {
                              result r;  // nothing found, but a bound
                              r.bound = 4.5;
                              return r;
                            }
                            return budget == 25 ? found(p, twice) : result{};
                          },
                          &calls};
  const auto curve = remat::pareto_curve(p, {50, 40, 25, 22, 20}, s);
  for (const auto& r : curve) {
    REQUIRE(r.found());
    CHECK(r.seconds == 5);
    CHECK(r.peak == 20);
    CHECK(r.recomputed == 1);
    CHECK(r.bound == 4.5);
    CHECK(r.status == status::feasible);
    CHECK(r.smallest_budget == 20);
    CHECK(remat::evaluate(p, r.schedule).peak <= r.budget);
  }
}

TEST_CASE("a schedule that is optimal at a larger budget and fits a smaller one ends the search there") {
  const auto p = skip();
  int calls = 0;
  const scripted_search s{[&](bytes_t) {
                            auto r = found(p, twice);
                            r.bound = 5;
                            return r;
                          },
                          &calls};
  const auto curve = remat::pareto_curve(p, {29, 25, 20}, s);
  CHECK(calls == 1);
  for (const auto& r : curve) CHECK(r.status == status::optimal);
}

TEST_CASE("a proof of infeasibility at a larger budget spares the smaller budgets, and all points report it") {
  const auto p = skip();
  int calls = 0;
  const scripted_search s{[&](bytes_t) {
                            result r;
                            r.status = status::infeasible;
                            return r;
                          },
                          &calls};
  const auto curve = remat::pareto_curve(p, {28, 25, 20}, s);
  CHECK(calls == 1);
  for (const auto& r : curve) {
    CHECK(r.status == status::infeasible);
    CHECK(r.budget_bound == 29);
  }
}

TEST_CASE("a sweep gets each possible budget once, and its answers are judged") {
  const auto p = skip();
  int calls = 0;
  std::vector<bytes_t> seen;
  const auto answer = [&](bytes_t budget) {
    auto r = found(p, budget >= 30 ? std::vector<remat::operation_id>{0, 1, 2, 3} : twice);
    r.seconds = 1;  // deliberately wrong
    return r;
  };
  auto curve = remat::pareto_curve(p, {10, 20, 35}, sweeping{{answer, &calls}, &seen});
  CHECK(seen == std::vector<bytes_t>{35, 20});
  CHECK(calls == 0);
  CHECK(curve[0].seconds == 4);
  CHECK(curve[0].status == status::optimal);
  CHECK(curve[1].seconds == 5);
  CHECK(curve[2].status == status::infeasible);

  constexpr auto largest = std::numeric_limits<bytes_t>::max();
  curve = remat::pareto_curve(p, {20, remat::max_peak, largest - 1, largest}, sweeping{{answer, &calls}, &seen});
  CHECK(seen == std::vector<bytes_t>{remat::max_peak, 20});
  REQUIRE(curve.size() == 4);
  CHECK((curve[0].budget == largest && curve[1].budget == largest - 1 && curve[2].budget == remat::max_peak));
  CHECK((curve[0].seconds == 4 && curve[2].seconds == 4 && curve[3].seconds == 5));

  struct silent : sweeping {  // shares no answers
    std::vector<result> sweep(const problem&, std::span<const bytes_t>, remat::monitor&) const { return {}; }
  };
  curve = remat::pareto_curve(p, {20, 35}, silent{{{answer, &calls}, &seen}});
  CHECK(calls == 2);
  CHECK(curve[1].found());

  struct short_of_one : sweeping {
    std::vector<result> sweep(const problem&, std::span<const bytes_t>, remat::monitor&) const { return {result{}}; }
  };
  CHECK_THROWS_AS(remat::pareto_curve(p, {20, 35}, short_of_one{{{answer, &calls}, &seen}}), remat::broken_contract);
  const auto over = [&](bytes_t) { return found(p, {0, 1, 2, 3}); };
  CHECK_THROWS_AS(remat::pareto_curve(p, {20, 35}, sweeping{{over, &calls}, &seen}), remat::broken_contract);
}

TEST_CASE("a bound on the budget that contradicts a schedule is a broken contract") {
  const auto p = skip();
  int calls = 0;
  const scripted_search s{[&](bytes_t budget) {
                            auto r = found(p, twice);
                            if (budget == 40) r.status = status::infeasible;
                            return r;
                          },
                          &calls};
  CHECK_THROWS_AS(remat::pareto_curve(p, {50, 40}, s), remat::broken_contract);
}

TEST_CASE("observers of a curve see progress and points, and can stop the curve") {
  const auto p = skip();
  int calls = 0;
  std::vector<bytes_t> points;
  std::vector<std::string> stages;
  const scripted_search s{[&](bytes_t) { return found(p, twice); }, &calls};
  remat::pareto_curve(
      p, {23, 26, 29}, s, {}, [&](const remat::progress& now) { stages.push_back(now.stage); },
      [&](const result& r) {
        points.push_back(r.budget);
        return r.budget == 26 ? control::stop : control::go_on;
      });
  CHECK(points == std::vector<bytes_t>{29, 26, 23});
  CHECK(stages == std::vector<std::string>{"point 1 of 3: working", "point 2 of 3: working"});
  CHECK(calls == 2);
  calls = 0;
  const auto curve = remat::pareto_curve(p, {23, 26, 29}, s, {}, [](const remat::progress&) { return control::stop; });
  CHECK(calls == 1);
  CHECK(curve[2].found());  // the schedule of the first point fits the other budgets
  calls = 0;
  remat::pareto_curve(p, {23, 26, 29}, s, {.seconds = 0});
  CHECK(calls == 0);
}

TEST_CASE("pareto_curve names options that are out of range") {
  const auto p = skip();
  CHECK_THROWS_WITH(remat::pareto_curve(p, {3, -1}, remat::store_all{}), Catch::Contains("-1"));
  CHECK_THROWS_WITH(remat::pareto_curve(p, {3}, remat::store_all{}, {.threads = 0}), Catch::Contains("limits.threads"));
  CHECK_THROWS_WITH(remat::pareto_curve(p, remat::evenly{0}, remat::store_all{}), Catch::Contains("evenly"));
}

TEST_CASE("evenly spaced budgets range from the smallest found to the peak of store-all") {
  const auto p = remat::testing::transformer_training_graph(2);
  const auto curve = remat::pareto_curve(p, remat::evenly{7}, remat::min_cut{});
  REQUIRE(curve.size() == 7);
  CHECK(curve.front().seconds == p.total_seconds());
  CHECK(curve.front().budget == remat::evaluate(p, remat::store_all_schedule(p)).peak);
  CHECK(curve.back().found());
  CHECK(curve.back().budget < curve.front().budget * 2 / 3);
  const auto step = static_cast<double>(curve[0].budget - curve[6].budget) / 6;
  for (std::size_t i = 1; i < curve.size(); ++i)
    CHECK(static_cast<double>(curve[i - 1].budget - curve[i].budget) == Approx(step).margin(2));
  CHECK(remat::pareto_curve(p, remat::evenly{1}, remat::min_cut{}).size() == 1);
  CHECK(remat::pareto_curve(problem(), remat::evenly{5}, remat::min_cut{}).size() == 1);  // all budgets are 0
}

TEST_CASE("curves of random problems are monotone, no worse than single searches, and never better than the optimum") {
  std::mt19937_64 g(11);
  for (int round = 0; round < 150; ++round) {
    const auto p = remat::testing::random_problem(g, {.operations = 6, .once = round % 3 == 0 ? 20 : 0});
    const auto all = remat::evaluate(p, remat::store_all_schedule(p)).peak;
    std::vector<bytes_t> budgets;
    for (bytes_t b = all / 2; b <= all; ++b) budgets.push_back(b);
    const auto curve = remat::pareto_curve(p, budgets, remat::min_cut{});
    REQUIRE(curve.size() == budgets.size());
    for (std::size_t i = 0; i < curve.size(); ++i) {
      const auto& r = curve[i];
      const auto optimum = remat::testing::exhaustive_optimum(p, r.budget);
      const auto alone = remat::solve(p, r.budget, remat::min_cut{});
      REQUIRE((!alone.found() || (r.found() && r.seconds <= alone.seconds)));
      if (r.found()) {
        const auto e = remat::evaluate(p, r.schedule);
        REQUIRE(e.peak == r.peak);
        REQUIRE(e.seconds == r.seconds);
        REQUIRE(e.peak <= r.budget);
        REQUIRE(optimum.has_value());
        REQUIRE(r.seconds >= *optimum);
      }
      if (optimum) {
        REQUIRE(r.status != status::infeasible);
        REQUIRE(r.budget_bound <= r.budget);
        REQUIRE(r.bound <= *optimum + 1e-9);
      }
      if (i > 0 && r.found()) REQUIRE((curve[i - 1].found() && curve[i - 1].seconds <= r.seconds));
      if (i > 0) REQUIRE(curve[i - 1].bound <= r.bound);
    }
  }
}

TEST_CASE("corrected bounds hold for a problem that says too much memory") {
  std::mt19937_64 g(12);
  int changed = 0, proven = 0;
  for (int round = 0; round < 150; ++round) {
    const auto p = remat::testing::random_problem(g, {.operations = 6});
    auto more = p.members();  // an operation needs less memory than its workspace says
    const auto less = static_cast<bytes_t>(1 + g() % 8);
    more.operations[g() % more.operations.size()].workspace += less;
    const problem q(std::move(more));
    const auto all = remat::evaluate(q, remat::store_all_schedule(q)).peak;
    std::vector<bytes_t> budgets;
    for (bytes_t b = all / 2; b <= all + less; ++b) budgets.push_back(b);
    const auto first = remat::pareto_curve(q, budgets, remat::min_cut{}, {.gap = 0});
    auto curve = first;
    remat::correct_bounds(q, curve, less, 0);
    for (std::size_t i = 0; i < curve.size(); ++i) {
      const auto& r = curve[i];
      const auto optimum = remat::testing::exhaustive_optimum(p, r.budget);
      changed += r.status != first[i].status || r.bound < first[i].bound;
      proven += r.status == status::optimal;
      if (r.status == status::infeasible) REQUIRE_FALSE(optimum);
      if (!optimum) continue;
      REQUIRE(r.budget_bound <= r.budget);
      REQUIRE(r.bound <= *optimum + 1e-9);
      if (r.status == status::optimal) REQUIRE(r.seconds <= *optimum + 1e-9);
    }
  }
  CHECK(changed > 300);
  CHECK(proven > 300);
}

TEST_CASE("a curve of the largest sizes that a problem accepts") {
  const problem p("large", {{"s", remat::max_bytes / 2, true}, {"a", 1}},
                  {{.name = "a", .inputs = {0}, .outputs = {1}, .seconds = 1, .workspace = remat::max_bytes}}, {1});
  const auto all = remat::measure_store_all(p).peak;
  CHECK(all > remat::max_bytes);
  const auto curve = remat::pareto_curve(p, {remat::max_peak}, remat::store_all{});
  CHECK(curve.at(0).found());
  CHECK(curve.at(0).smallest_budget == all);
  CHECK(curve.at(0).budget_bound == all);
}

TEST_CASE("smallest_budget ends for any tolerance, without a time limit") {
  const auto r = remat::smallest_budget(skip(), start_keeper{}, {.seconds = std::numeric_limits<double>::infinity()}, 1e-17);
  CHECK(r.peak == 30);
  CHECK(r.budget_bound < r.peak);  // so that the small steps end by the tolerance
}
