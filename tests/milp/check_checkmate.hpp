// SPDX-License-Identifier: Apache-2.0
/// @file
/// What `checkmate` must do with any backend; each adapter's tests include this.
#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include <remat/core/solve.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

#include "staged_oracle.hpp"

namespace remat::testing {

/// A random problem and a budget that makes recomputation worthwhile: at least what no search rules out, below what the needed
/// operations take without any.
struct tight_case {
  problem p;
  bytes_t budget;
};
inline tight_case tight_problem(std::mt19937_64& g) {
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

/// `count` random problems: checkmate is optimal among staged schedules, and never better than any schedule.
template <milp::backend B>
void check_against_oracles(std::uint64_t seed, int count, unsigned extra_stages = 0) {
  std::mt19937_64 g(seed);
  int found = 0, recomputing = 0, restricted = 0;
  for (int k = 0; k < count; ++k) {
    const auto [p, budget] = tight_problem(g);
    const auto staged = staged_optimum(p, budget, extra_stages);
    const auto any = exhaustive_optimum(p, budget);
    typename checkmate<B>::options o;
    o.rules.extra_stages = extra_stages;
    const auto r = solve(p, budget, checkmate<B>(o), {.gap = 0});
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    REQUIRE(r.found() == staged.has_value());
    if (staged) {
      CHECK(r.seconds == Approx(*staged).epsilon(1e-9));
      REQUIRE(any);
      CHECK(r.seconds >= *any - 1e-9);
      CHECK(r.bound <= *any + 1e-9);
      CHECK(r.scope_bound == Approx(*staged).epsilon(1e-5));
      if (extra_stages == 0) {
        const staged_form form(p, budget);
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
      CHECK(r.status == status::time_limit);
      CHECK(std::isinf(r.scope_bound));
    }
    const auto fast = solve(p, budget, checkmate<B>(checkmate<B>::options::fast()), {.gap = 0});
    if (fast.found()) {
      REQUIRE(staged_optimum(p, budget));
      CHECK(fast.seconds >= *staged_optimum(p, budget) - 1e-9);
      ++restricted;
    }
  }
  CHECK(recomputing > count / 8);
  CHECK(found > recomputing / 2);
  CHECK(restricted > 0);
}

/// The unit chain has a closed form: n + 1 + t(n + 1, B - 2), t(l, s) = r l - C(s + r, s + 1), r least with C(s + r, s) >= l.
template <milp::backend B>
void check_unit_chains() {
  const double known[][3] = {{4, 4, 11}, {6, 4, 18}, {8, 4, 26}, {8, 5, 22}};
  for (const auto& [n, budget, optimum] : known) {
    const auto p = unit_training_chain(static_cast<std::size_t>(n));
    const auto r = solve(p, static_cast<bytes_t>(budget), checkmate<B>(), {.seconds = milp::infinity, .gap = 0});
    REQUIRE(r.found());
    CHECK(r.seconds == Approx(optimum));
    CHECK(r.scope_gap() < 1e-6);
    CHECK(r.scope == "staged schedules");
  }
}

/// Edges of the interface.
template <milp::backend B>
void check_edges() {
  const checkmate<B> method;
  CHECK(method.name() == "checkmate/" + B().name());
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
    // The second operation is not needed and must not run, although its output would not fit.
    const problem p("", {{"a", 1, false}, {"b", 1, false}, {"huge", 100, false}}, {{"f", {0}, {1}, 1}, {"g", {1}, {2}, 1}}, {1});
    const auto r = solve(p, 2, method);
    CHECK(r.status == status::optimal);
    CHECK(compute_order(r.schedule) == std::vector<index_t>{0});
  }
  const auto p = unit_training_chain(6);
  {
    const auto without = solve(p, 5, method, {.gap = 0});
    typename checkmate<B>::options o;
    o.start = without.schedule;
    o.restricted_first = false;
    CHECK(solve(p, 5, checkmate<B>(o), {.gap = 0}).seconds == without.seconds);
    o.start->compute(0);  // not staged: a cutoff only
    o.start->drop(0);
    CHECK(solve(p, 5, checkmate<B>(o), {.gap = 0}).seconds == without.seconds);
    o.start->drop(0);  // not even valid: ignored
    CHECK(solve(p, 5, checkmate<B>(o), {.gap = 0}).seconds == without.seconds);
  }
  {
    typename checkmate<B>::options o;
    o.rules.turn = 1000;
    CHECK_THROWS_AS(solve(p, 5, checkmate<B>(o)), bad_option);
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
