// SPDX-License-Identifier: Apache-2.0
// Hierarchical planning: equal parts, nested parts, and graphs that are not chains.
#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/hierarchical.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"
#include "../networks.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<hierarchical<>> && solver<hierarchical<rotor>> &&
              solver<hierarchical<rotor, join_by_outer<hierarchical<>>>>);

namespace {

/// `min_cut` with little effort.
min_cut quick() { return min_cut({.moments = 1, .cuts = 4, .mixtures = 1, .bound = false, .repairs = 1000, .effort = 0}); }

/// Counts the problems that it solves.
struct counting_inner {
  min_cut inner = quick();
  std::atomic<int>* calls = nullptr;
  std::string name() const { return "counting"; }
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    ++*calls;
    return inner.solve(p, budget, m);
  }
};

}  // namespace

TEST_CASE("with_like_costs makes costs that differ by noise equal, within the tolerance") {
  std::mt19937_64 g(33);
  const auto p = transformer_training_graph(8);
  auto operations = p.operations();
  for (auto& op : operations) op.seconds *= 1 + 1e-4 * static_cast<double>(uniform(g, -200, 200));
  const problem noisy("noisy", p.values(), operations, p.targets());
  const auto alike = with_like_costs(noisy, 0.1);
  std::vector<double> before, after;
  for (std::size_t o = 0; o < operations.size(); ++o) {
    CHECK(std::abs(alike.operations()[o].seconds / operations[o].seconds - 1) < 0.1);
    before.push_back(operations[o].seconds);
    after.push_back(alike.operations()[o].seconds);
  }
  CHECK(alike.total_seconds() == Approx(noisy.total_seconds()));
  const auto distinct = [](std::vector<double> list) {
    std::sort(list.begin(), list.end());
    return std::unique(list.begin(), list.end()) - list.begin();
  };
  CHECK(distinct(before) > 120);
  CHECK(distinct(after) < 40);
  const auto same = with_like_costs(noisy, 0);
  for (std::size_t o = 0; o < operations.size(); ++o) CHECK(same.operations()[o].seconds == operations[o].seconds);
}

TEST_CASE("hierarchical solves no more parts if there are more equal layers") {
  std::vector<int> counts;
  std::mt19937_64 g(34);
  for (const std::size_t layers : {12u, 24u, 48u}) {
    const auto plain = transformer_training_graph(layers);
    auto operations = plain.operations();
    for (auto& op : operations) op.seconds *= 1 + 1e-4 * static_cast<double>(uniform(g, -200, 200));
    const problem p("noisy", plain.values(), operations, plain.targets());
    std::atomic<int> calls = 0;
    counting_inner inner;
    inner.calls = &calls;
    hierarchical<counting_inner>::options o;
    o.cut.size = 30;
    o.bound = false;
    o.effort = 0;
    const auto r = solve(p, share_of_peak(p, .6), hierarchical<counting_inner>(inner, join_by_default(), o));
    CHECK(r.found());
    counts.push_back(calls);
  }
  CHECK(counts[0] > 0);
  CHECK(counts[1] <= counts[0] + 21);
  CHECK(counts[2] <= counts[1]);
}

TEST_CASE("hierarchical passes the conformance suite") {
  hierarchical<>::options o;
  o.cut.size = 3;
  o.leaf_operations = 4;
  o.saved = 3;
  o.peaks = 2;
  o.effort = 0;
  const hierarchical<> tiny_parts(quick(), join_by_default(), o);
  CHECK(check_solver(tiny_parts, {.rounds = shortened(80)}) == std::vector<std::string>{});
}

TEST_CASE("hierarchical is at most 3 % slower than min_cut on training graphs that are not chains", "[long]") {
  struct sample {
    std::string name;
    problem p;
  };
  for (const auto& [name, p] :
       {sample{"u-net", u_net(4, 4)}, sample{"dense net", dense_net(3, 5)}, sample{"branches", branches(3, 3, 4)}}) {
    const auto all = p.total_seconds();
    for (const double f : {.8, .6, .5}) {
      const auto budget = share_of_peak(p, f);
      const auto r = solve(p, budget, hierarchical<>(quick())), cut = solve(p, budget, quick());
      INFO(name << " at " << f << ": " << 100 * (r.seconds / all - 1) << " %, min_cut " << 100 * (cut.seconds / all - 1) << " %");
      CHECK(r.found() >= cut.found());
      if (!r.found() || !cut.found()) continue;
      CHECK(r.seconds <= 1.03 * cut.seconds);
      CHECK(r.bound <= r.seconds);
    }
  }
}

TEST_CASE("hierarchical with nested parts is at most 2 % slower than with flat parts") {
  const auto p = transformer_training_graph(16);
  hierarchical<>::options flat, nested;
  nested.cut = {.size = 120, .most = 5};
  nested.leaf_operations = 60;
  flat.bound = nested.bound = false;
  flat.effort = nested.effort = 0;
  flat.saved = nested.saved = 3;
  flat.peaks = nested.peaks = 2;
  const auto light = quick();
  const auto budget = share_of_peak(p, .5);
  const auto a = solve(p, budget, hierarchical<>(light, join_by_default(), flat)),
             b = solve(p, budget, hierarchical<>(light, join_by_default(), nested));
  REQUIRE(a.found());
  REQUIRE(b.found());
  CHECK(b.seconds < 1.02 * a.seconds);
}

TEST_CASE("hierarchical uses the partition of the user, and refuses invalid partitions") {
  std::mt19937_64 g(35);
  const auto p = random_training_chain(g, 8);
  // forward 0-7, loss 8, backward 9-16
  hierarchical<>::options o;
  o.parts = structure::partition{{{0, 1, 2}, {14, 15, 16}}, {{3, 4, 5}, {11, 12, 13}}};
  CHECK(solve(p, share_of_peak(p, .7), hierarchical<>(min_cut{}, join_by_default{}, o)).found());
  const auto refused = [&](structure::partition parts) {
    o.parts = std::move(parts);
    solve(p, max_bytes, hierarchical<>(min_cut{}, join_by_default{}, o));
  };
  CHECK_THROWS_WITH(refused({{{0, 1}, {}}, {{2, 1}, {}}}), Catch::Contains("part 1") && Catch::Contains("operation 1 "));
  CHECK_THROWS_WITH(refused({{{0, 1}, {99}}}), Catch::Contains("part 0") && Catch::Contains("99"));
  CHECK_THROWS_WITH(refused({{{0, 2}, {}}}), Catch::Contains("part 0") && Catch::Contains("depends on itself"));
  CHECK_THROWS_WITH(refused({{{16}, {0}}}), Catch::Contains("part 0") && Catch::Contains("operation 16"));
  CHECK_THROWS_WITH(refused({{{0}, {}}, {}}), Catch::Contains("part 1") && Catch::Contains("empty"));
  CHECK_THROWS_AS(refused({{{0, 2}, {}}, {{1, 3}, {}}}), bad_option);
  CHECK_THROWS_AS(hierarchical<>(min_cut{}, join_by_default{}, {.saved = 0}), bad_option);
  CHECK_THROWS_AS(hierarchical<>(min_cut{}, join_by_default{}, {.peaks = 0}), bad_option);
  CHECK_THROWS_AS(hierarchical<>(min_cut{}, join_by_default{}, {.tolerance = -1}), bad_option);
  CHECK_THROWS_AS(join_by_chain({.slots = 0}), bad_option);
  CHECK_THROWS_AS(join_by_chain({.budgets = 0}), bad_option);
  CHECK_THROWS_WITH(join_by_chain({.budgets_of_parts = 0}), Catch::Contains("join_by_chain.budgets_of_parts"));
  CHECK_THROWS_AS(join_by_outer<min_cut>(quick(), {.peaks = 0}), bad_option);
  CHECK_THROWS_AS(join_by_outer<min_cut>(quick(), {.selections = 0}), bad_option);
  CHECK_THROWS_WITH(join_by_outer<min_cut>(quick(), {.selections_of_parts = 0}), Catch::Contains("selections_of_parts"));
  CHECK_THROWS_AS(join_by_outer<min_cut>(quick(), {.share = 0}), bad_option);
}

TEST_CASE("hierarchical with each joiner alone, as published, passes the conformance suite") {
  using one = hierarchical<min_cut, join_by_chain>;
  using other = hierarchical<min_cut, join_by_outer<min_cut>>;
  auto chain = one::options::plain();
  auto outer = other::options::plain();
  chain.cut.size = outer.cut.size = 3;
  chain.leaf_operations = outer.leaf_operations = 4;
  chain.saved = outer.saved = 2;
  chain.peaks = outer.peaks = 2;
  CHECK(check_solver(one(quick(), join_by_chain(), chain), {.rounds = shortened(40)}) == std::vector<std::string>{});
  CHECK(check_solver(other(quick(), join_by_outer(quick()), outer), {.rounds = shortened(40)}) == std::vector<std::string>{});
}

TEST_CASE("with_like_costs keeps tiers and links, and refuses tolerances that are no finite number") {
  const memory_system tiers{{{"device"}, {"host"}, {"disk"}}, {{1, 2, 1}, {2, 1, 1}}};
  const problem p("tiers", {{"a", 1}, {"b", 1}}, {{"o", {}, {0}, 1}, {"o", {0}, {1}, 1.01}}, {1}, copy_rates{1, 1}, std::nullopt,
                  tiers);
  const auto alike = with_like_costs(p, 0.1);
  CHECK(alike.tiers().size() == 3);
  CHECK(alike.links().size() == 4);
  const problem free("free", {{"a", 1}, {"b", 1}}, {{"o", {}, {0}, 0}, {"o", {0}, {1}, 0}}, {1});
  for (const double t : {-1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    CHECK_THROWS_WITH(with_like_costs(free, t), Catch::Contains("with_like_costs.tolerance"));
    CHECK_THROWS_WITH((hierarchical<>({}, {}, {.tolerance = t})), Catch::Contains("hierarchical.tolerance"));
  }
}
