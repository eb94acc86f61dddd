// SPDX-License-Identifier: Apache-2.0
// Checks of `checkmate` with any MILP backend. The tests of each adapter call them.
#include "checks.hpp"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/checkmate_rounding.hpp>
#include <remat/staged/published_form.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "../staged_oracle.hpp"

namespace remat::testing {

namespace {

using exact = checkmate<milp::any_backend>;
using rounding = checkmate_rounding<milp::any_backend>;

/// A random problem and a budget that makes recomputation worthwhile: no less than the bounds without search, and less than the
/// peak of the needed operations in order.
struct tight_case {
  problem p;
  bytes_t budget;
};
tight_case tight_problem(std::mt19937_64& g) {
  for (;;) {
    random_options o;
    o.operations = static_cast<std::size_t>(uniform(g, 4, 7));
    o.sources = static_cast<std::size_t>(uniform(g, 1, 2));
    o.once = 10;
    auto p = random_problem(g, o);
    if (p.values().size() > 12) continue;
    const auto low = bounds_without_search(p).budget;
    const auto high = evaluate(p, with_drops(p, needed_operations(p))).peak - 1;
    if (low <= high) return {std::move(p), uniform(g, low, high)};
  }
}

}  // namespace

void check_against_oracles(const milp::any_backend& library, std::uint64_t seed, int count, unsigned extra_stages,
                           bool last_stage) {
  std::mt19937_64 g(seed);
  int found = 0, recomputing = 0, restricted = 0, searched = 0;
  for (int k = 0; k < count; ++k) {
    const auto [p, budget] = tight_problem(g);
    const auto staged = staged_optimum(p, budget, extra_stages, last_stage);
    const auto any = exhaustive_optimum(p, budget);
    exact::options o;
    o.rules.extra_stages = extra_stages;
    o.rules.last_stage = last_stage;
    const auto r = solve(p, budget, exact(o, library), {.gap = 0});
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    REQUIRE(r.found() == staged.has_value());
    if (staged) {
      CHECK(r.seconds == Approx(*staged).epsilon(1e-9));
      REQUIRE(any);
      CHECK(r.seconds >= *any - 1e-9);
      CHECK(r.bound <= *any + 1e-9);
      CHECK(r.scope_bound == Approx(*staged).epsilon(1e-5));
      if (extra_stages == 0) {
        const staged::strong_form form(p, budget, o.rules);
        const auto x = form.encode(r.schedule);
        REQUIRE(x);
        CHECK(milp::violation(form.model(), *x, 1e-9).empty());
        CHECK(form.model().objective(*x) * form.unit() == Approx(r.seconds));
        CHECK(form.extract(*x) == r.schedule);
      }
      ++found;
      recomputing += r.recomputed > 0;
      if (r.status == status::optimal) CHECK(r.seconds == Approx(*any).epsilon(1e-9));
    } else if (r.status == status::infeasible) {
      CHECK(!any);
    } else {
      CHECK(r.status == status::not_found);
      CHECK(r.reason == "proven: none of the " + r.scope + " fits");
      CHECK(std::isinf(r.scope_bound));
      ++searched;
    }
    const auto fast = solve(p, budget, exact(exact::options::fast(), library), {.gap = 0});
    if (fast.found()) {
      REQUIRE(staged_optimum(p, budget));
      CHECK(fast.seconds >= *staged_optimum(p, budget) - 1e-9);
      ++restricted;
    }
  }
  CHECK(recomputing > count / 8);
  CHECK(found > recomputing / 2);
  CHECK(restricted > 0);
  CHECK(searched > 0);
}

void check_unit_chains(const milp::any_backend& library) {
  const double known[][3] = {{4, 4, 11}, {6, 4, 18}, {8, 4, 26}, {8, 5, 22}};
  for (const auto& [n, budget, optimum] : known) {
    const auto p = unit_training_chain(static_cast<std::size_t>(n));
    const auto r = solve(p, static_cast<bytes_t>(budget), exact({}, library), {.seconds = milp::infinity, .gap = 0});
    REQUIRE(r.found());
    CHECK(r.seconds == Approx(optimum));
    CHECK(r.scope_gap() < 1e-6);
    CHECK(r.scope == "staged schedules");
  }
}

void check_all_topologies(const milp::any_backend& library, std::size_t n) {
  std::mt19937_64 g(n);
  int count = 0, tight = 0;
  for (std::uint64_t edges = 0; edges < std::uint64_t{1} << (n * (n - 1) / 2); ++edges) {
    std::vector<value> values(n);
    std::vector<operation> operations(n);
    std::vector<bool> read(n, false);
    for (std::size_t i = 0, bit = 0; i < n; ++i) {
      values[i].bytes = uniform(g, 0, 6);
      operations[i].outputs = {static_cast<index_t>(i)};
      operations[i].seconds = static_cast<double>(uniform(g, 0, 6));
      operations[i].workspace = uniform(g, 0, 2);
      for (std::size_t j = 0; j < i; ++j, ++bit)
        if (edges >> bit & 1) operations[i].inputs.push_back(static_cast<index_t>(j)), read[j] = true;
    }
    if (std::count(read.begin(), read.end(), false) > 1) continue;
    const problem p("topology", std::move(values), std::move(operations), {static_cast<index_t>(n - 1)});
    const auto low = bounds_without_search(p).budget, high = evaluate(p, store_all_schedule(p)).peak;
    const auto budget = uniform(g, low, std::max(low, high - 1));
    const auto r = solve(p, budget, exact({}, library), {.gap = 0});
    const auto staged = staged_optimum(p, budget);
    INFO("edges " << edges << ", budget " << budget);
    REQUIRE(r.found() == staged.has_value());
    if (staged) REQUIRE(r.seconds == Approx(*staged).epsilon(1e-9));
    if (staged && r.recomputed > 0) ++tight;
    ++count;
  }
  int expected = 1;
  for (std::size_t i = 1; i < n; ++i) expected *= (1 << i) - 1;
  CHECK(count == expected);
  if (n >= 5) CHECK(tight > count / 50);
}

void check_pebbles(const milp::any_backend& library) {
  const auto solve_unit = [&](std::vector<std::vector<value_id>> inputs, bytes_t budget) {
    std::vector<value> values(inputs.size(), {"", 1, false});
    std::vector<operation> operations;
    for (auto& in : inputs) operations.push_back({"", in, {static_cast<index_t>(operations.size())}, 1});
    const problem p("", std::move(values), std::move(operations), {static_cast<index_t>(inputs.size() - 1)});
    return solve(p, budget, exact({}, library), {.seconds = milp::infinity, .gap = 0});
  };
  for (index_t base = 2; base <= 4; ++base) {
    std::vector<std::vector<value_id>> pyramid(base);
    for (index_t row = base; row > 1; --row)
      for (index_t i = 1; i < row; ++i) {
        const auto left = static_cast<index_t>(pyramid.size()) - row;
        pyramid.push_back({left, left + 1});
      }
    CHECK(pyramid.size() == base * (base + 1) / 2);
    CHECK(solve_unit(pyramid, base + 1).seconds == pyramid.size());
    const auto less = solve_unit(pyramid, base);
    CHECK_FALSE(less.found());
    CHECK((less.status == status::infeasible || std::isinf(less.scope_bound)));
  }
  for (int height = 2; height <= 4; ++height) {
    std::vector<std::vector<value_id>> tree;
    const std::function<value_id(int)> grow = [&](int h) {
      std::vector<value_id> children;
      if (h > 1) {
        children.push_back(grow(h - 1));
        children.push_back(grow(h - 1));
      }
      tree.push_back(children);
      return static_cast<index_t>(tree.size() - 1);
    };
    grow(height);
    CHECK(solve_unit(tree, height + 1).seconds == (1 << height) - 1);
    CHECK_FALSE(solve_unit(tree, height).found());
  }
}

void check_restrictions(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  const limits l{.gap = 0};
  int equal[5] = {}, worse[5] = {};
  for (int k = 0; k < count; ++k) {
    const auto random = tight_problem(g);
    const auto& p = random.p;
    const auto budget = random.budget;
    const auto turn = static_cast<index_t>(uniform(g, 1, static_cast<std::int64_t>(p.operations().size()) - 1));
    const auto with = [&](const problem& q, const staged::staging& rules) {
      return solve(q, budget, exact({.rules = rules, .restricted_first = false}, library), l);
    };
    INFO("seed " << seed << ", case " << k << ", budget " << budget << ", turn " << turn);
    const auto free = with(p, {});
    const staged::staging rules[] = {{.backward_once = true, .backward_start = turn},
                                     {.forward_in_one_stage = true, .backward_start = turn},
                                     {.recompute_where_used = true},
                                     {.small_values = 0.3},
                                     {true, true, true, turn, 0, 0.3}};
    for (int i = 0; i < 5; ++i) {
      const auto r = with(p, rules[i]);
      if (r.found()) {
        REQUIRE(free.found());
        REQUIRE(r.seconds >= free.seconds - 1e-9);
      }
      CHECK(r.scope_bound >= free.scope_bound * (1 - 1e-6));
      const bool same = r.found() == free.found() && (!r.found() || r.seconds == Approx(free.seconds));
      ++(same ? equal : worse)[i];
      if (free.found() && free.recomputed == 0 && i < 3) CHECK(same);
    }
    const auto more = with(p, {.last_stage = true});
    const auto most = with(p, {.extra_stages = 1, .last_stage = true});
    if (free.found()) CHECK(more.seconds <= free.seconds + 1e-9);
    if (more.found()) CHECK(most.seconds <= more.seconds + 1e-9);
    auto operations = p.operations();
    for (auto o = turn; o < operations.size(); ++o) operations[o].once = true;
    const auto once = with(problem("", p.values(), operations, p.targets()), {});
    const auto r1 = with(p, rules[0]);
    REQUIRE(r1.found() == once.found());
    if (once.found()) CHECK(r1.seconds == Approx(once.seconds));
  }
  for (int i = 0; i < 5; ++i) {
    INFO("restriction " << i + 1);
    CHECK(equal[i] > count / 4);
    CHECK(worse[i] > 0);
  }
}

void check_published_form(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  const limits l{.gap = 0};
  int recomputing = 0;
  for (int k = 0; k < count; ++k) {
    const auto [p, budget] = tight_problem(g);
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    const auto strong = solve(p, budget, exact({}, library), l);
    const auto published = solve(p, budget, checkmate<milp::any_backend, staged::published_form>({}, library), l);
    REQUIRE(published.found() == strong.found());
    CHECK(published.status == strong.status);
    if (!strong.found()) continue;
    CHECK(published.seconds == Approx(strong.seconds));
    CHECK(published.scope_bound == Approx(strong.scope_bound).epsilon(1e-5));
    const staged::published_form form(p, budget);
    const auto x = form.encode(strong.schedule);
    REQUIRE(x);
    CHECK(milp::violation(form.model(), *x, 1e-9).empty());
    CHECK(form.extract(*x) == strong.schedule);
    if (strong.recomputed > 0) ++recomputing;
  }
  CHECK(recomputing > count / 8);
  CHECK_THROWS_AS(staged::published_form(unit_training_chain(3), 5, {.recompute_where_used = true}), bad_option);
}

void check_sweep(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  const limits l{.gap = 0};
  const exact method({}, library);
  for (int k = 0; k < count; ++k) {
    const auto p = tight_problem(g).p;
    const auto low = bounds_without_search(p).budget - 1, high = evaluate(p, store_all_schedule(p)).peak + 1;
    std::vector<bytes_t> budgets;
    for (auto b = high; b >= low; --b) budgets.push_back(b);
    for (auto i = budgets.size() - 1; i > 0; --i) std::swap(budgets[i], budgets[g() % (i + 1)]);
    monitor m(l), n(l);
    const auto results = method.sweep(p, budgets, m);
    const auto steps = method.staircase(p, low, high, n);
    REQUIRE(results.size() == budgets.size());
    INFO("seed " << seed << ", case " << k);
    for (std::size_t i = 0; i < budgets.size(); ++i) {
      INFO("budget " << budgets[i]);
      const auto& r = results[i];
      const auto staged = staged_optimum(p, budgets[i]), any = exhaustive_optimum(p, budgets[i]);
      CHECK(r.budget == budgets[i]);
      if (staged) REQUIRE(r.found());
      if (!r.found()) continue;
      REQUIRE(any);
      CHECK(r.peak <= budgets[i]);
      CHECK(evaluate(p, r.schedule).seconds == Approx(r.seconds));
      CHECK(r.seconds >= *any - 1e-9);
      CHECK(r.bound <= *any + 1e-9);
      if (r.status == status::optimal) CHECK(r.seconds == Approx(*any));
      if (staged) {
        CHECK(r.seconds <= *staged + 1e-9);
        CHECK(r.scope_bound <= *staged * (1 + 1e-6));
      }
      const auto step = std::find_if(steps.begin(), steps.end(), [&](const result& s) {
        return s.budget >= budgets[i] && s.found() && s.peak <= budgets[i];
      });
      if (staged) {
        REQUIRE(step != steps.end());
        CHECK(step->seconds <= *staged + 1e-9);
      }
    }
  }
  monitor m(l);
  CHECK(method.sweep(problem(), {}, m).empty());
  CHECK_THROWS_AS(method.sweep(problem(), std::vector<bytes_t>{-1}, m), bad_option);
}

void check_rounding(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  int all = 0, best = 0, published = 0;
  for (int k = 0; k < count; ++k) {
    const auto [p, budget] = tight_problem(g);
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    const auto any = exhaustive_optimum(p, budget), staged = staged_optimum(p, budget);
    const auto r = solve(p, budget, rounding({{}, {0.05, 0.1, 0.2}, 11, true}, library));
    const auto two = solve(p, budget, checkmate_rounding<milp::any_backend, staged::published_form>({}, library));
    if (r.found() || two.found()) REQUIRE(any);
    for (const auto& x : {r, two}) {
      if (x.found()) CHECK(x.seconds >= *any - 1e-9);
      if (staged) CHECK(x.scope_bound <= *staged * (1 + 1e-6));
    }
    CHECK(two.scope_bound <= r.scope_bound * (1 + 1e-6));  // the strong form has the tighter relaxation
    all += any.has_value();
    best += r.found() && r.seconds <= *any * 1.02;
    published += two.found() && two.seconds <= *any * 1.02;
  }
  INFO(all << " feasible, of which within 2 %: " << best << ", as published " << published);
  CHECK(best > all / 3);
  CHECK(best > published);
  CHECK_THROWS_AS(rounding({.allowances = {1}}, library), bad_option);
  CHECK_THROWS_AS(rounding({.thresholds = 0}, library), bad_option);
}

void check_conformance(const milp::any_backend& library, std::size_t rounds) {
  const solver_suite few{.rounds = rounds};
  for (const auto& failure : check_solver(exact({}, library), few)) FAIL_CHECK(failure);
  for (const auto& failure : check_solver(rounding({}, library), few)) FAIL_CHECK(failure);
}

void check_edges(const milp::any_backend& library) {
  const exact method({}, library);
  CHECK(method.name() == "checkmate/" + library.name());
  {
    const problem nothing;
    const auto r = solve(nothing, 0, method);
    CHECK(r.status == status::optimal);
    CHECK(r.schedule.steps.empty());
  }
  {
    const problem only_held("held", {{"parameter", 10, true}}, {}, {0});
    CHECK(solve(only_held, 10, method).status == status::optimal);
    CHECK(solve(only_held, 9, method).status == status::infeasible);
  }
  {
    // The target does not need the second operation, which must not run: its output exceeds the budget.
    const problem p("", {{"a", 1, false}, {"b", 1, false}, {"huge", 100, false}}, {{"f", {0}, {1}, 1}, {"g", {1}, {2}, 1}}, {1});
    const auto r = solve(p, 2, method);
    CHECK(r.status == status::optimal);
    CHECK(compute_order(r.schedule) == std::vector{operation_id(0)});
  }
  const auto p = unit_training_chain(6);
  {
    const auto without = solve(p, 5, method, {.gap = 0});
    exact::options o;
    o.start = without.schedule;
    o.restricted_first = false;
    CHECK(solve(p, 5, exact(o, library), {.gap = 0}).seconds == without.seconds);
    o.start->compute(0);  // valid but not staged: serves as a cutoff only
    o.start->drop(0);
    CHECK(solve(p, 5, exact(o, library), {.gap = 0}).seconds == without.seconds);
    o.start->drop(0);  // not even valid: ignored
    CHECK(solve(p, 5, exact(o, library), {.gap = 0}).seconds == without.seconds);
  }
  {
    const auto rejected = [&](const staged::staging& rules) {
      CHECK_THROWS_AS(solve(p, 5, exact({.rules = rules}, library)), bad_option);
    };
    rejected({.backward_start = p.operations().size()});
    rejected({.small_values = 1});
    rejected({.small_values = std::nan("")});
    rejected({.order = {0, 1, 2}});
    rejected({.order = {1, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}});
    rejected({.order = {0, 0}});
    rejected({.order = {99}});
  }
  {
    const auto r = solve(p, 5, method, {.seconds = 0});
    CHECK(r.status == status::time_limit);
    const auto stopped =
        solve(unit_training_chain(14), 5, method, {.seconds = 100}, [](const progress&) { return control::stop; });
    CHECK(stopped.elapsed < 50);
  }
  CHECK_THROWS_AS(solve(p, 5, method, {.gap = std::nan("")}), bad_option);
  CHECK_THROWS_AS(solve(p, -1, method), bad_option);
}

}  // namespace remat::testing
