// SPDX-License-Identifier: Apache-2.0
// Checks of `multi_cut_bound` and `moments` with any MILP backend. The tests of each adapter call them.
#include "../rounds.hpp"
#include "checks.hpp"

#include <catch2/catch.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/order/exact_order_search.hpp>
#include <remat/solver/moments.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>
#include <remat/testing/tier_oracle.hpp>

namespace remat::testing {

namespace {

using method_of_moments = moments<milp::any_backend>;

/// Bounds of the model with the given moments: by its relaxation and by the MILP; infinity if there is no solution.
struct moment_optimum {
  double relaxed, integer;
};
moment_optimum solve_moments(const milp::any_backend& library, const problem& p, bytes_t budget,
                             const std::vector<operation_id>& moments, const bound::multi_cut_options& o = {}) {
  const bound::multi_cut_model form(p, budget, moments, o, library.longest_row);
  const auto solve = [&](const milp::model& m) {
    const auto s = milp::solve(library, m, {.gap = 0});
    REQUIRE((s.status == milp::status::optimal || s.status == milp::status::infeasible));
    return s.bound * form.unit();
  };
  return {solve(form.relaxation()), solve(form.model())};
}

/// Random operations on one path, each an ancestor of the next.
std::vector<operation_id> random_moments(const problem& p, std::mt19937_64& g, int percent) {
  std::vector<operation_id> moments;
  const auto needed = needed_operations(p);
  std::vector<operation_id> path = {
      needed[static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(needed.size()) - 1))]};
  for (;;) {
    std::vector<operation_id> makers;
    for (auto u : p.operations()[path.back()].inputs)
      if (!p.is_source(u)) makers.push_back(p.producer(u));
    if (makers.empty()) break;
    path.push_back(makers[static_cast<std::size_t>(uniform(g, 0, static_cast<std::int64_t>(makers.size()) - 1))]);
  }
  for (auto o : path)
    if (chance(g, percent)) moments.insert(moments.begin(), o);
  return moments;
}

/// Records the number of columns of each model (negative for a relaxation), and stops the search after some models. A relaxation
/// takes a while, so that a search that looks at its time limit would take another path. Branch and bound ends at once without an
/// answer.
struct noting_backend {
  milp::any_backend library;
  monitor* m;
  std::size_t most;
  std::shared_ptr<std::vector<Eigen::Index>> models = std::make_shared<std::vector<Eigen::Index>>();
  std::size_t longest_row = library.longest_row;

  std::string name() const { return "noting"; }
  milp::solution solve(const milp::model& model, const milp::options& o) const {
    const bool mixed = std::find(model.integer.begin(), model.integer.end(), true) != model.integer.end();
    models->push_back(mixed ? model.columns() : -model.columns());
    milp::solution s;
    s.status = milp::status::limit;
    if (!mixed) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      s = library.solve(model, o);
    }
    if (models->size() == most) m->request_stop();
    return s;
  }
};

}  // namespace

void check_moment_forms(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  int positive = 0, tight = 0, several = 0, infeasible = 0, stronger = 0;
  for (int k = 0; k < count; ++k) {
    const bool chain = k % 5 == 4;
    random_options o;
    o.operations = static_cast<std::size_t>(uniform(g, 4, 8));
    o.once = k % 3 == 0 ? 25 : 0;
    const auto p = chain ? random_training_chain(g, 3) : random_problem(g, o);
    if (p.values().size() > 20) continue;
    const auto low = bounds_without_search(p).budget, high = evaluate(p, with_drops(p, needed_operations(p))).peak - 1;
    if (low > high) continue;
    const auto budget = uniform(g, low, high);
    const auto moments = random_moments(p, g, 60);
    const auto bound = solve_moments(library, p, budget, moments);
    const auto best = exhaustive_optimum(p, budget).value_or(std::numeric_limits<double>::infinity());
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    const auto slack = 1e-6 * p.total_seconds();
    REQUIRE(bound.relaxed <= bound.integer + slack);
    REQUIRE(bound.integer <= best + slack);
    const auto least = bounds_without_search(p).seconds;
    positive += bound.integer > least + slack;
    several += bound.integer > bound::min_cut_bound(p, budget).seconds + slack;
    infeasible += std::isinf(bound.integer);
    tight += std::abs(bound.integer - best) < slack;
    if (moments.empty()) continue;
    // With all windows and rows, one more moment never weakens the relaxation. Without the long windows it may.
    const bound::multi_cut_options full{.light = 0, .reach = 99}, few{.light = 0, .reach = 1};
    auto rest = moments;
    rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(rest.size() / 2));
    const auto all = solve_moments(library, p, budget, moments, full);
    REQUIRE(all.integer <= best + slack);
    CHECK(all.relaxed >= solve_moments(library, p, budget, rest, full).relaxed - slack);
    CHECK(all.relaxed >= solve_moments(library, p, budget, moments, few).relaxed - slack);
    stronger += all.relaxed > solve_moments(library, p, budget, moments, few).relaxed + slack;
    const auto tau = moments.front();
    const auto single = solve_moments(library, p, budget, {tau});
    bound::retention_cut cut(p, needed_operations(p), tau);
    const auto room = budget + cut.room();
    if (cut.retain_least().bytes > room) {
      CHECK(std::isinf(single.relaxed));
      continue;
    }
    for (const double lambda : {0.05, 0.3, 1.0, 3.0}) {
      const auto c = cut.minimum(lambda);
      CHECK(single.relaxed >= least + c.seconds + lambda * static_cast<double>(c.bytes - room) - 2e-5 * p.total_seconds());
    }
  }
  CHECK(positive > count / 8);
  CHECK(several > count / 40);
  CHECK(tight > count / 8);
  CHECK(infeasible > 0);
  CHECK(stronger >= shortened(1));
}

void check_moment_orders(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  int compared = 0, several = 0, stronger = 0, tight = 0;
  for (int k = 0; k < count; ++k) {
    const auto p = random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 4, 8)), .target = 30});
    const auto low = bounds_without_search(p).budget, high = evaluate(p, store_all_schedule(p)).peak - 1;
    if (p.values().size() > 20 || low > high || !order::exact_order_search::supports(p)) continue;
    const auto budget = uniform(g, low, high);
    const auto known = order::exact_order_search(p, budget).fastest();
    if (!known.order) continue;
    const auto best = measure_order(p, *known.order).seconds;
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    const auto slack = 1e-6 * p.total_seconds();
    // Random operations in the order of their first runs in a fastest schedule.
    std::vector<operation_id> moments;
    std::vector<bool> has_run(p.operations().size(), false);
    for (auto o : *known.order) {
      if (!has_run[o] && chance(g, 60)) moments.push_back(o);
      has_run[o] = true;
    }
    const auto bound = solve_moments(library, p, budget, moments, {.light = 0, .reach = k % 2 == 0 ? 99U : 1U});
    REQUIRE(bound.relaxed <= bound.integer + slack);
    REQUIRE(bound.integer <= best + slack);
    ++compared;
    several += !std::is_sorted(moments.begin(), moments.end());
    // The search over all orders.
    monitor m;
    const auto proven = bound::multi_cut_bound(p, budget, m, {}, library).seconds;
    REQUIRE(proven <= best + slack);
    stronger += proven > bound::min_cut_bound(p, budget).seconds + slack;
    tight += best > bounds_without_search(p).seconds + slack && proven > best - slack;
  }
  CAPTURE(compared, several, stronger, tight);
  CHECK(compared > count / 3);
  CHECK(several > count / 20);
  CHECK(stronger > count / 20);
  CHECK(tight > count / 20);
}

void check_order_of_moments(const milp::any_backend& library) {
  // The loss and its gradient fill the budget, so the forward must run again. The last weight gradient also reads the large
  // gradient, and may run before or after the rest of the backward. Either way, little of the forward is on the device at that
  // time.
  const std::size_t layers = 5;
  std::vector<value> values = {{"x", 1, true}};
  std::vector<operation> operations;
  std::vector<value_id> targets;
  const auto add = [&](std::vector<value_id> inputs, bytes_t bytes, double seconds) {
    values.push_back({"v" + std::to_string(values.size()), bytes, false});
    const auto made = static_cast<value_id>(values.size() - 1);
    std::sort(inputs.begin(), inputs.end());
    operations.push_back(
        {.name = "o" + std::to_string(operations.size()), .inputs = std::move(inputs), .outputs = {made}, .seconds = seconds});
    return made;
  };
  std::vector<value_id> a = {0};
  for (std::size_t i = 0; i < layers; ++i) a.push_back(add({a.back()}, 2, 1));
  const auto loss = add({a.back()}, 10, 8), large = add({loss}, 10, 8);
  auto d = add({large}, 1, 1);
  targets.push_back(add({a.back(), large}, 1, 1));
  for (auto i = layers; i > 0; --i) d = add({a[i], a[i - 1], d}, 1, 1);
  targets.push_back(d);
  const problem p("order", values, operations, targets);
  const bytes_t budget = 21;
  const auto best = exhaustive_optimum(p, budget);
  REQUIRE(best);
  monitor m;
  const auto proven = bound::multi_cut_bound(p, budget, m, {}, library).seconds;
  CHECK(proven <= *best * (1 + 1e-9));
  const auto path = solve_moments(library, p, budget, {5, 6, 7, 9, 10, 11, 12, 13}, {.light = 0, .reach = 99});
  CHECK(proven > path.integer + 0.5);
}

void check_moment_forms_with_copies(const milp::any_backend& library, std::uint64_t seed, int count) {
  std::mt19937_64 g(seed);
  int compared = 0, slower = 0, several = 0, tight = 0;
  for (int k = 0; k < count; ++k) {
    const auto plain = k % 3 == 2 ? random_training_chain(g, static_cast<std::size_t>(uniform(g, 1, 2)))
                                  : random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 6)),
                                                       .sources = 1,
                                                       .outputs = static_cast<std::size_t>(uniform(g, 1, 2)),
                                                       .once = k % 2 == 0 ? 40 : 0});
    if (plain.values().size() > 9) continue;
    auto values = plain.values();
    for (std::size_t v = 0; k % 4 == 3 && v < values.size(); v += 2) values[v].movable = false;
    const auto rate = [&] { return 0.5 * static_cast<double>(uniform(g, 1, 8)); };
    const copy_rates link{rate(), rate(), 0.5 * static_cast<double>(uniform(g, 0, 1))};
    const problem p("copied", values, plain.operations(), plain.targets(), link);
    const auto low = bounds_without_search(p).budget, high = evaluate(p, store_all_schedule(p)).peak - 1;
    if (low > high) continue;
    const auto budget = uniform(g, low, high);
    const auto best = exhaustive_optimum_on_tiers(p, budget, 4000);
    if (!best || !std::isfinite(best->seconds)) continue;
    INFO("seed " << seed << ", case " << k << ", budget " << budget);
    const auto slack = 1e-6 * best->seconds;
    for (const int percent : {100, 50}) {
      const auto moments = random_moments(p, g, percent);
      if (moments.empty()) continue;
      const auto bound = solve_moments(library, p, budget, moments, {.light = 0, .reach = percent == 100 ? 99U : 1U});
      REQUIRE(bound.relaxed <= bound.integer + slack);
      REQUIRE(bound.integer <= best->seconds + slack);
      ++compared;
      slower += best->seconds > bounds_without_search(p).seconds + slack;
      several += bound.relaxed > bound::copy_bound(p, budget) + slack;
      tight += best->seconds > bounds_without_search(p).seconds + slack && bound.integer > best->seconds - slack;
    }
  }
  CAPTURE(compared, slower, several, tight);
  CHECK(compared > count / 6);
  CHECK(several > count / 120);
  CHECK(tight > count / 500);
}

void check_multi_cut_limits(const milp::any_backend& library) {
  std::mt19937_64 g(7);
  for (int k = 0; k < 3; ++k) {
    const auto p = random_training_chain(g, 12);
    const auto least = bounds_without_search(p).budget;
    const auto budget = least + (evaluate(p, store_all_schedule(p)).peak - least) / 3;
    std::vector<Eigen::Index> before;
    double bound = 0;
    for (const auto& [seconds, most] : {std::pair(10.0, std::size_t{3}), {100.0, 6}, {1000.0, 1000}}) {
      monitor m({.seconds = seconds});
      const noting_backend backend{library, &m, most};
      const auto proven = bound::multi_cut_bound(p, budget, m, {.moments = 7}, backend);
      INFO("case " << k << ", " << most << " models");
      CHECK(proven.seconds >= bound);
      const auto& models = *backend.models;
      REQUIRE(models.size() >= before.size());
      CHECK(std::equal(before.begin(), before.end(), models.begin()));
      before = models, bound = proven.seconds;
    }
    CHECK(before.size() > 4);
  }
}

void check_moments(const milp::any_backend& library) {
  for (const auto& failure : check_solver(method_of_moments({}, library), {.rounds = shortened(60)})) FAIL_CHECK(failure);
  const method_of_moments method({}, library);
  CHECK(method.name() == "moments/" + library.name());
  CHECK_THROWS_AS(method_of_moments({.moments = 0}, library), bad_option);
  CHECK_THROWS_AS(method_of_moments({.reach = 0}, library), bad_option);
  CHECK_THROWS_AS(method_of_moments({.negligible = std::nan("")}, library), bad_option);
  CHECK_THROWS_WITH(method_of_moments({.light = 1}, library),
                    Catch::Contains("multi_cut_options.light") && Catch::Contains("1.0"));
  int proven = 0;
  std::mt19937_64 g(5);
  for (int k = 0; k < 20; ++k) {
    const auto p = random_training_chain(g, 6);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    const auto r = solve(p, bounds_without_search(p).budget + (all - bounds_without_search(p).budget) / 2, method, {.gap = 1e-4});
    proven += r.status == status::optimal;
    CHECK(r.bound >= bound::min_cut_bound(p, r.budget).seconds);
  }
  CHECK(proven > 5);
}

}  // namespace remat::testing
