// SPDX-License-Identifier: Apache-2.0
// Planners with copies to the host.
#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <remat/core/pareto_curve.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/solver/offmate.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/tier_oracle.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<offmate<>> && solver<offload_only>);

namespace {

constexpr auto no_limit = std::numeric_limits<double>::infinity();

/// A link that moves the bytes of store-all above the held bytes out and back in `rho` times the time of store-all.
problem copying(const problem& p, double rho) {
  const double bytes = static_cast<double>(share_of_peak(p, 1) - p.held_bytes());
  const double rate = 2 * bytes / (rho * p.total_seconds());
  return p.with_copies(copy_rates{rate, rate, 1e-5 * p.total_seconds()});
}
std::size_t copies_of(const result& r) {
  return static_cast<std::size_t>(std::count_if(r.schedule.steps.begin(), r.schedule.steps.end(), [](const step& s) {
    return s.what == action::offload || s.what == action::prefetch;
  }));
}

}  // namespace

TEST_CASE("offmate passes the conformance suite") {
  for (const auto& failure : check_solver(offmate<>(min_cut{}, {.effort = 20'000, .idle = 1}), {.rounds = shortened(300)}))
    FAIL_CHECK(failure);
}

TEST_CASE("offload_only passes the conformance suite") {
  for (const auto& failure : check_solver(offload_only{}, {.rounds = shortened(500)})) FAIL_CHECK(failure);
}

TEST_CASE("offmate solves every budget from the least on, no slower than either means alone, and never below the optimum",
          "[long]") {
  std::mt19937_64 g(5);
  int compared = 0, met = 0, joint = 0;
  const offmate<> both(min_cut{}, {.effort = 40'000, .idle = 2});
  for (int round = 0; round < 250; ++round) {
    const auto plain = round % 3 == 0 ? random_training_chain(g, static_cast<std::size_t>(uniform(g, 1, 2)))
                                      : random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 2, 5)),
                                                           .sources = 1,
                                                           .outputs = 1,
                                                           .once = round % 2 == 0 ? 20 : 0});
    const auto rate = [&] { return 0.5 * static_cast<double>(uniform(g, 1, 12)); };
    const auto p = plain.with_copies(copy_rates{rate(), rate(), 0.5 * static_cast<double>(uniform(g, 0, 1))});
    const auto least = bounds_without_search(p).budget;
    const auto budget = uniform(g, least, std::max(least, share_of_peak(p, 1) - 1));
    INFO("round " << round << ", budget " << budget);
    REQUIRE(solve(p, least - 1, both).status == status::infeasible);
    const auto r = solve(p, budget, both, {.seconds = no_limit, .gap = 0});
    REQUIRE(r.found());
    const auto copied = solve(p, budget, offload_only{}), made = solve(plain, budget, min_cut{}, {.seconds = no_limit});
    REQUIRE(copied.found());
    CHECK(r.seconds <= copied.seconds + 1e-9);
    if (made.found()) CHECK(r.seconds <= made.seconds + 1e-9);
    joint += r.seconds < copied.seconds - 1e-9 && !(made.found() && made.seconds <= r.seconds + 1e-9);
    if (p.values().size() > 12) continue;
    const auto optimum = exhaustive_optimum_on_tiers(p, budget, 10'000);
    if (!optimum) continue;
    REQUIRE(r.bound <= optimum->seconds + 1e-5);
    REQUIRE(r.seconds >= optimum->seconds - 1e-5);
    if (r.status == status::optimal) REQUIRE(r.seconds <= optimum->seconds + 1e-5);
    ++compared;
    met += r.seconds <= optimum->seconds + 1e-5;
  }
  CAPTURE(compared, met, joint);
  CHECK(compared > 100);
  CHECK(100 * met > 80 * compared);
  CHECK(joint > 0);
}

TEST_CASE("offmate is as fast as store-all with a fast link, recomputes with a dead link, and copies nothing if all fits") {
  const auto p = transformer_training_graph(4);
  const auto budget = share_of_peak(p, 0.6);
  const offmate<> both(min_cut{}, {.starts = 4, .idle = 4});
  const limits l{.seconds = no_limit};
  const auto fast = solve(copying(p, 1e-3), budget, both, l);
  CHECK(fast.status == status::optimal);
  CHECK(fast.seconds == Approx(p.total_seconds()));
  CHECK(copies_of(fast) > 0);
  const auto dead = solve(copying(p, 1e9), budget, both, l);
  const auto alone = solve(p, budget, min_cut{}, l);
  CHECK(dead.seconds <= alone.seconds * (1 + 1e-9));
  CHECK(dead.bound == Approx(alone.bound).epsilon(2e-3));
  CHECK(copies_of(dead) == 0);
  const auto fits = solve(copying(p, 1), share_of_peak(p, 1), both, l);
  CHECK(fits.status == status::optimal);
  CHECK(copies_of(fits) == 0);
  const auto without = solve(p, budget, offmate<>{}, l);
  CHECK(without.schedule == alone.schedule);
  CHECK(solve(p, budget, offload_only{}).status == status::not_applicable);
}

TEST_CASE("offmate is not slower with a faster link or more memory, within a tolerance of the search", "[long]") {
  const auto p = transformer_training_graph(3);
  const offmate<> both(min_cut{}, {.scan = 6, .inner = 1, .starts = 4, .effort = 100'000, .idle = 2});
  double before = no_limit;
  for (const double rho : {8.0, 4.0, 2.0, 1.0, 0.5, 0.25}) {
    const auto r = solve(copying(p, rho), share_of_peak(p, 0.5), both, {.seconds = no_limit});
    REQUIRE(r.found());
    CHECK(r.seconds <= before * 1.005);
    before = r.seconds;
  }
  CHECK(before == Approx(p.total_seconds()));
  const auto curve = pareto_curve(copying(p, 2), {share_of_peak(p, 0.4), share_of_peak(p, 0.6), share_of_peak(p, 0.8)}, both,
                                  {.seconds = no_limit});
  for (std::size_t i = 1; i < curve.size(); ++i) CHECK(curve[i - 1].seconds <= curve[i].seconds);
}

TEST_CASE("offmate on captured networks is faster than copies alone, and near the bound", "[long]") {
  for (const auto* const name : {"resnet18", "gpt2-layers-2-seq-256"}) {
    INFO(name);
    const auto p = copying(instance(name), 2);
    const auto budget = share_of_peak(p, 0.6);
    const auto r = solve(p, budget, offmate<>(min_cut{}, {.starts = 4, .idle = 4}), {.seconds = no_limit});
    const auto copied = solve(p, budget, offload_only{}, {.seconds = no_limit});
    REQUIRE((r.found() && copied.found()));
    CHECK(r.seconds < copied.seconds);
    CHECK(r.bound == copied.bound);
    CHECK(r.gap() < 0.02);
    CHECK(copies_of(r) > 0);
  }
}

TEST_CASE("offmate computes values that only the backward needs early if copies dominate the time") {
  const std::size_t layers = 12;  // layers of a value and a value for its backward, 10 bytes and one second each
  std::vector<value> values = {{.name = "x", .bytes = 1}};
  std::vector<operation> operations;
  const auto run = [&](std::vector<value_id> inputs, bytes_t bytes) {
    values.push_back({.name = "", .bytes = bytes});
    operations.push_back(
        {.name = "", .inputs = std::move(inputs), .outputs = {static_cast<value_id>(values.size() - 1)}, .seconds = 1});
    return operations.back().outputs[0];
  };
  std::vector<value_id> made = {0};
  for (std::size_t i = 0; i < layers; ++i) made.push_back(run({made.back()}, 10));
  auto gradient = run({made.back()}, 1);
  for (std::size_t i = layers; i > 0; --i) gradient = run({gradient, run({made[i]}, 10)}, 1);
  const problem p("", values, operations, {gradient}, copy_rates{5, 20, 0});
  const auto r = solve(p, 50, offmate<>{}, {.seconds = no_limit});
  CHECK(r.seconds == Approx(p.total_seconds()));
}

TEST_CASE("offmate on several threads is valid, calls observers one at a time, and stops at once") {
  const auto p = copying(transformer_training_graph(1), 2);
  const auto budget = share_of_peak(p, 0.5);
  const offmate<> both(min_cut{}, {.scan = 2, .inner = 1, .effort = 5'000, .idle = 1});
  const auto one = solve(p, budget, both, {.seconds = no_limit});
  CHECK(solve(p, budget, both, {.seconds = no_limit}).schedule.steps == one.schedule.steps);
  for (const unsigned threads : {2U, 3U}) {
    std::atomic<int> inside = 0;
    int told = 0;
    double best = std::numeric_limits<double>::infinity();
    const auto r = solve(p, budget, both, {.seconds = no_limit, .threads = threads}, [&](const progress& x) {
      CHECK(++inside == 1);
      ++told;
      if (x.schedule) CHECK(x.best <= best);
      if (x.schedule) best = x.best;
      --inside;
    });
    REQUIRE(r.found());
    CHECK(told > 0);
    CHECK(r.seconds <= best);
    CHECK(r.bound == one.bound);
    CHECK(r.seconds < 1.02 * one.seconds);
    int reports = 0;
    const auto stopped = solve(p, budget, both, {.seconds = no_limit, .threads = threads},
                               [&](const progress& x) { return x.schedule && ++reports == 3 ? control::stop : control::go_on; });
    CHECK(stopped.found());
    CHECK(stopped.seconds >= r.bound * (1 - 1e-9));
  }
}

TEST_CASE("offmate planned for slower links is judged by the rates of the problem, and better at slower rates") {
  const auto p = copying(instance("gpt2-layers-2-seq-256"), 2);
  const auto budget = share_of_peak(p, 0.6);
  const auto slower = with_slower_links(p, 0.9);
  CHECK(slower.copies()->to_host == Approx(0.9 * p.copies()->to_host));
  CHECK(slower.copies()->to_device == Approx(0.9 * p.copies()->to_device));
  CHECK(slower.copies()->latency == p.copies()->latency);
  const auto full = solve(p, budget, offmate<>(min_cut{}, {.effort = 20'000, .idle = 1}), {.seconds = no_limit});
  double reported = 0;
  const auto less = solve(p, budget, offmate<>(min_cut{}, {.effort = 20'000, .idle = 1, .rate_share = 0.9}),
                          {.seconds = no_limit}, [&](const progress& x) { reported = std::max(reported, x.bound); });
  REQUIRE((full.found() && less.found()));
  CHECK(less.bound == full.bound);
  CHECK(reported <= full.bound);
  CHECK(less.seconds == evaluate(p, less.schedule).seconds);
  CHECK(evaluate(slower, less.schedule).seconds < evaluate(slower, full.schedule).seconds);
  CHECK(solve(p, bounds_without_search(p).budget - 1, offmate<>(min_cut{}, {.rate_share = 0.5})).status == status::infeasible);
  for (const double share : {0.0, -1.0, 1.5, std::nan("")}) {
    CHECK_THROWS_WITH(with_slower_links(p, share), Catch::Contains("share"));
    CHECK_THROWS_WITH(offmate<>(min_cut{}, {.rate_share = share}), Catch::Contains("offmate.rate_share"));
  }
}

TEST_CASE("options of offmate that are out of range are named") {
  CHECK_THROWS_WITH(offmate<>(min_cut{}, {.scan = 0}), Catch::Contains("offmate.scan"));
  CHECK_THROWS_WITH(offmate<>(min_cut{}, {.starts = 0}), Catch::Contains("offmate.starts"));
  CHECK_THROWS_WITH(copies::copy_search_options{.patience = 0}.validate(), Catch::Contains("copy_search_options.patience"));
}
