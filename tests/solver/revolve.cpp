// SPDX-License-Identifier: Apache-2.0
// Binomial checkpointing and its generalisation to unequal links.
#include <catch2/catch.hpp>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

using namespace remat;
using namespace remat::testing;

static_assert(solver<revolve>);

namespace {

/// The least time of `revolve_table` for links i to j in m bytes, straight from its formula.
double least(const chain& c, std::size_t i, std::size_t j, bytes_t m) {
  const double never = std::numeric_limits<double>::infinity();
  const auto& links = c.links;
  const auto gradient = [&](std::size_t k) { return k < links.size() ? links[k].gradient : 0; };
  if (i == j) {
    const auto& o = links[i].options[0];
    return m >= o.saved + gradient(i + 1) + std::max(o.forward_transient, o.backward_transient) ? o.forward + o.backward : never;
  }
  double best = never;
  for (auto s = i + 1; s <= j; ++s) {
    double forward = 0;
    bytes_t need = 0, kept = 0;
    for (auto t = i; t < s; ++t) {
      forward += links[t].checkpoint_seconds;
      need = std::max(need, gradient(j + 1) + (t > i ? links[t].input : 0) + links[t + 1].input + links[t].checkpoint_transient);
    }
    for (auto t = s; t <= j; ++t) kept += links[t].kept;
    if (m >= need) best = std::min(best, forward + least(c, s, j, m - links[s].input) + least(c, i, s - 1, m - kept));
  }
  return best;
}

}  // namespace

TEST_CASE("revolve_forwards is the recursion of Griewank and Walther") {
  constexpr std::size_t most = 80;
  std::vector<std::vector<std::uint64_t>> t(most + 1, std::vector<std::uint64_t>(12, 0));
  for (std::size_t l = 2; l <= most; ++l)
    for (std::size_t s = 1; s < 12; ++s) {
      t[l][s] = l * (l - 1) / 2;
      for (std::size_t m = 1; s > 1 && m < l; ++m) t[l][s] = std::min<std::uint64_t>(t[l][s], m + t[l - m][s - 1] + t[m][s]);
    }
  for (std::size_t l = 1; l <= most; ++l)
    for (std::size_t s = 1; s < 12; ++s) CHECK(revolve_forwards(l, s) == t[l][s]);
  CHECK(revolve_forwards(1000, 1000) == 999);
  CHECK(revolve_forwards(1000, 1'000'000'000'000) == 999);
  constexpr auto largest = std::uint64_t{1} << 31;
  CHECK(revolve_forwards(largest, 1) == largest * (largest - 1) / 2);
  CHECK(revolve_forwards(largest, largest) == largest - 1);
  CHECK(revolve_forwards(largest, largest - 2) == 2 * largest - largest);  // one step twice
  CHECK_THROWS_WITH(revolve_forwards(0, 1), Catch::Contains("steps must be in [1, 2^31], got 0"));
  CHECK_THROWS_WITH(revolve_forwards(largest + 1, 1), Catch::Contains("steps"));
  CHECK_THROWS_WITH(revolve_forwards(1, 0), Catch::Contains("slots must be >= 1, got 0"));
}

TEST_CASE("schedules take as many steps as the closed form says, in as many slots, however long") {
  for (const auto& [links, slots] : {std::pair{1u, 1u},
                                     {2u, 1u},
                                     {7u, 2u},
                                     {30u, 3u},
                                     {30u, 30u},
                                     {31u, 100u},
                                     {500u, 1u},
                                     {1000u, 5u},
                                     {10'000u, 3u},
                                     {10'000u, 12u},
                                     {10'000u, 10'000u},
                                     {200'000u, 20u}}) {
    INFO(links << " links, " << slots << " slots");
    const auto steps = revolve_schedule(links, slots);
    // Backwards: state i is wanted from where it is made, or the beginning for state 0, to its last use before that.
    std::vector<bool> wanted(links + 1, false);
    std::size_t live = 0, most = 0, checkpoints = 0, next = 0;
    const auto set = [&](std::size_t state, bool to) {
      if (wanted[state] != to) live += to ? 1 : static_cast<std::size_t>(-1);
      wanted[state] = to;
    };
    bool valid = true;
    for (auto k = steps.size(); k-- > 0;) {
      const auto& s = steps[k];
      switch (s.what) {
        case chain_step::kind::backward:  // the last one first
          valid = valid && s.link == next++ && k > 0 && steps[k - 1] == chain_step{chain_step::kind::forward, s.link, 0};
          break;
        case chain_step::kind::forward:
          set(s.link, true);
          break;
        case chain_step::kind::checkpoint:
          ++checkpoints;
          valid = valid && wanted[s.link + 1];
          set(s.link + 1, false);
          set(s.link, true);
          break;
      }
      most = std::max(most, live);
    }
    CHECK(valid);
    CHECK(next == links);
    CHECK(live == 1);
    CHECK(wanted[0]);
    CHECK(checkpoints == revolve_forwards(links, slots));
    CHECK(most <= slots + 1);  // and the state that is being moved
  }
  CHECK_THROWS_WITH(revolve_schedule(3, 0), Catch::Contains("slots"));
}

TEST_CASE("revolve finds the optimum of unit chains for every budget") {
  for (std::size_t n = 1; n <= 24; ++n) {
    const auto p = unit_training_chain(n);
    CHECK_FALSE(solve(p, 2, revolve{}).found());
    for (std::size_t budget = 3; budget <= n + 3; ++budget) {
      INFO("n " << n << ", budget " << budget);
      const auto r = solve(p, static_cast<bytes_t>(budget), revolve{});
      REQUIRE(r.found());
      CHECK(r.seconds == static_cast<double>(n + 1 + revolve_forwards(n + 1, budget - 2)));
      if (n <= 6) CHECK(r.seconds == exhaustive_optimum(p, static_cast<bytes_t>(budget)));
    }
  }
}

TEST_CASE("the table of unequal links is its formula, and its schedules keep what it promises") {
  std::mt19937_64 g(43);
  int points = 0;
  for (int round = 0; round < 60; ++round) {
    const auto p = random_training_chain(g, static_cast<std::size_t>(uniform(g, 2, 7)));
    const auto blocks = find_blocks(p, {.least = 1});
    if (blocks.blocks.size() < 2) continue;
    const block_joint joint(p, blocks);
    const auto most = 2 * evaluate(p, store_all_schedule(p)).peak;
    const revolve_table exact(joint.links(), most, static_cast<std::size_t>(most)), rough(joint.links(), most, 20);
    const auto& c = joint.links();
    const auto front = exact.front();
    REQUIRE_FALSE(front.empty());
    for (std::size_t i = 0; i < front.size(); ++i) {
      const auto& [budget, seconds] = front[i];
      const auto n = c.links.size() - 1;
      CHECK(least(c, 0, n, budget - c.links[0].input) == Approx(seconds));
      CHECK(least(c, 0, n, budget - 1 - c.links[0].input) > seconds + 1e-9);
      const auto needs = measure_order(p, joint.order(exact.steps(budget)));
      CHECK(needs.seconds <= seconds + 1e-9);
      CHECK(needs.peak <= budget + joint.aside());
      ++points;
    }
    for (const auto& [budget, seconds] : rough.front()) {
      const auto needs = measure_order(p, joint.order(rough.steps(budget)));
      CHECK(needs.peak <= budget + joint.aside());
      CHECK(seconds >= least(c, 0, c.links.size() - 1, budget - c.links[0].input) - 1e-9);
    }
  }
  CHECK(points > 100);
}

TEST_CASE("a table may be stopped, and be too small for anything") {
  const auto p = unit_training_chain(9);
  const auto blocks = find_blocks(p, {.least = 1});
  const block_joint joint(p, blocks);
  CHECK(revolve_table(joint.links(), 20, 20, [] { return true; }).front().empty());
  CHECK(revolve_table(joint.links(), 0, 20).front().empty());
  CHECK(revolve_table(chain{}, 20, 20).front().empty());
}

TEST_CASE("revolve conforms to what is asked of solvers") {
  for (const auto& failure : check_solver(revolve{}, {.rounds = 600})) FAIL_CHECK(failure);
  const revolve few({.blocks = {.most = 3, .least = 1}, .links = 2, .slots = 10});
  for (const auto& failure : check_solver(few, {.rounds = 200, .seed = 2})) FAIL_CHECK(failure);
}

TEST_CASE("revolve on unequal chains: more memory is never slower, and both rules are of use") {
  std::mt19937_64 g(44);
  int found = 0, between = 0;
  for (int round = 0; round < 8; ++round) {
    const auto p = random_training_chain(g, 14);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    double before = 0;
    for (auto budget = all; budget > all / 4; budget -= 3) {
      const auto r = solve(p, budget, revolve{});
      if (!r.found()) break;
      ++found;
      CHECK(r.seconds >= before - 1e-9);
      between += r.seconds > before && before > 0;
      before = r.seconds;
    }
  }
  CHECK(found > 100);
  CHECK(between > 40);
}

TEST_CASE("revolve on a long chain, on a network, and where there is no chain") {
  const auto p = unit_training_chain(900);
  for (const std::size_t budget : {7u, 60u}) {
    const auto r = solve(p, static_cast<bytes_t>(budget), revolve{});
    REQUIRE(r.found());
    CHECK(r.seconds == static_cast<double>(901 + revolve_forwards(901, budget - 2)));
  }
  const auto network = transformer_training_graph(8);
  const auto all = evaluate(network, store_all_schedule(network)).peak;
  const auto r = solve(network, network.held_bytes() + (all - network.held_bytes()) / 2, revolve{});
  REQUIRE(r.found());
  CHECK(r.seconds < 1.45 * network.total_seconds());
  std::vector<value> values = {{"x", 1, true}, {"a", 5}, {"b", 5}, {"c", 5}};
  const problem triangle("triangle", values, {{"a", {0}, {1}, 1}, {"b", {0, 1}, {2}, 1}, {"c", {0, 1, 2}, {3}, 1}}, {3});
  CHECK_FALSE(solve(triangle, 15, revolve{}).found());
}

TEST_CASE("options of revolve that are out of range are named") {
  CHECK_THROWS_WITH(revolve({.links = 0}), Catch::Contains("revolve.links"));
  CHECK_THROWS_WITH(revolve({.slots = 0}), Catch::Contains("revolve.slots"));
  CHECK_THROWS_WITH(revolve({.slots = 10'001}), Catch::Contains("revolve.slots"));
  CHECK_THROWS_WITH(solve(unit_training_chain(4), 4, revolve({.blocks = {.most = 0}})), Catch::Contains("most"));
}
