// SPDX-License-Identifier: Apache-2.0
// `any_solver` behaves like the solver inside it, with all of its abilities.
#include <catch2/catch.hpp>

#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <remat/core/any_solver.hpp>
#include <remat/core/pareto_curve.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/testing/archetypes.hpp>
#include <remat/testing/generators.hpp>

using remat::any_solver;
using remat::bytes_t;
using remat::problem;
using remat::result;

static_assert(remat::sweeping_solver<any_solver>);
static_assert(std::is_convertible_v<remat::store_all, any_solver> && std::is_copy_assignable_v<any_solver>);
static_assert(!std::is_constructible_v<any_solver, int>);

namespace {

struct calls {
  int solves = 0, sweeps = 0;
};

/// Store-all with a count of its calls, for one budget and for a sweep.
struct counting {
  std::shared_ptr<calls> count = std::make_shared<calls>();

  std::string name() const { return "counting"; }
  result solve(const problem& p, bytes_t budget, remat::monitor& m) const {
    ++count->solves;
    return remat::store_all().solve(p, budget, m);
  }
  std::vector<result> sweep(const problem& p, std::span<const bytes_t> budgets, remat::monitor& m) const {
    ++count->sweeps;
    std::vector<result> all;
    for (auto b : budgets) all.push_back(remat::store_all().solve(p, b, m));
    return all;
  }
};

/// Finds nothing.
struct forgetful {
  std::string name() const { return "forgetful"; }
  result solve(const problem&, bytes_t, remat::monitor&) const { return {}; }
};

}  // namespace

TEST_CASE("any_solver answers like the solver inside") {
  const auto p = remat::testing::unit_training_chain(5);
  const auto peak = remat::evaluate(p, remat::store_all_schedule(p)).peak;
  for (auto budget : {peak, peak - 1}) {
    const auto a = remat::solve(p, budget, remat::store_all()), b = remat::solve(p, budget, any_solver(remat::store_all()));
    CHECK((a.status == b.status && a.schedule == b.schedule && a.solver == b.solver));
  }
  any_solver copy = counting();
  CHECK(copy.name() == "counting");
  copy = any_solver(remat::store_all());
  CHECK(copy.name() == "store_all");
  CHECK(any_solver(copy).name() == "store_all");  // not an any_solver within an any_solver
}

TEST_CASE("a curve of any_solver uses the sweep of the solver inside") {
  const auto p = remat::testing::unit_training_chain(5);
  const auto peak = remat::evaluate(p, remat::store_all_schedule(p)).peak;
  const counting inside;
  const auto curve = remat::pareto_curve(p, {peak, peak + 1, peak + 2}, any_solver(inside));
  REQUIRE(curve.size() == 3);
  for (const auto& r : curve) CHECK(r.found());
  CHECK((inside.count->sweeps == 1 && inside.count->solves == 0));
}

namespace {

/// Returns its start schedule if that fits.
struct stubborn {
  remat::schedule start = {};
  std::string name() const { return "stubborn"; }
  result solve(const problem& p, bytes_t budget, remat::monitor&) const {
    result r;
    if (!start.steps.empty() && remat::evaluate(p, start).peak <= budget) r.status = remat::status::feasible, r.schedule = start;
    return r;
  }
  stubborn with_start(remat::schedule s) const { return {std::move(s)}; }
};

static_assert(remat::warm_startable<stubborn> && !remat::warm_startable<remat::store_all>);

}  // namespace

TEST_CASE("any_solver passes the start schedule to the solver inside") {
  const auto p = remat::testing::unit_training_chain(5);
  const auto known = remat::store_all_schedule(p);
  remat::monitor m;
  CHECK_FALSE(any_solver(stubborn()).solve(p, 100, m).found());
  CHECK(any_solver(stubborn()).with_start(known).solve(p, 100, m).schedule == known);
  CHECK(any_solver(any_solver(stubborn())).with_start(known).solve(p, 100, m).schedule == known);
  CHECK(any_solver(remat::store_all()).with_start(known).name() == "store_all");
}

TEST_CASE("an answer is never slower than the start schedule, whatever the solver does") {
  const auto p = remat::testing::unit_training_chain(5);
  const auto known = remat::store_all_schedule(p);
  const auto e = remat::evaluate(p, known);
  for (const any_solver& s : {any_solver(stubborn()), any_solver(remat::store_all()), any_solver(forgetful())}) {
    const auto r = remat::solve(p, e.peak, s, remat::start_from(known));
    CHECK((r.found() && r.seconds <= e.seconds && r.peak <= e.peak));
    CHECK(remat::evaluate(p, r.schedule).seconds == r.seconds);
    CHECK_FALSE(remat::solve(p, e.peak - 1, s, remat::start_from(known)).found());  // the start schedule does not fit
  }
  CHECK_THROWS_AS(remat::solve(p, e.peak, forgetful(), remat::start_from({})), remat::bad_schedule);
}

TEST_CASE("a curve of any_solver without a sweep solves each budget") {
  const auto p = remat::testing::unit_training_chain(5);
  const auto peak = remat::evaluate(p, remat::store_all_schedule(p)).peak;
  const auto curve = remat::pareto_curve(p, {peak, peak - 1}, any_solver(remat::store_all()));
  REQUIRE(curve.size() == 2);
  CHECK((curve[0].found() && !curve[1].found()));
}

TEST_CASE("smallest_budget takes no other steps with any_solver than with the solver inside") {
  const auto p = remat::testing::transformer_training_graph(2);
  const counting bare, wrapped;
  CHECK(remat::smallest_budget(p, bare).peak == remat::smallest_budget(p, any_solver(wrapped)).peak);
  CHECK(wrapped.count->solves == bare.count->solves);
  CHECK_FALSE(remat::starts_warm(any_solver(bare)));
}
