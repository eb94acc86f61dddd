// SPDX-License-Identifier: Apache-2.0
// Checkpoints at the ends of segments and of blocks: chen, recompute_all_blocks, and the articulation points they may use.
#include <catch2/catch.hpp>

#include <algorithm>
#include <tuple>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/structure/articulation.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/recompute_all_blocks.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using namespace remat::testing;

static_assert(solver<chen> && solver<recompute_all_blocks>);

namespace {

/// Pieces of the undirected graph of `ops` and two stubs, without the operation `gone`.
std::size_t pieces(const problem& p, const std::vector<index_t>& ops, index_t gone) {
  std::vector<std::size_t> piece(p.operations().size() + 2);
  const auto source = p.operations().size(), sink = source + 1;
  for (std::size_t i = 0; i < piece.size(); ++i) piece[i] = i;
  const auto join = [&](std::size_t a, std::size_t b) {
    const auto from = piece[a], to = piece[b];
    if (a != gone && b != gone) std::replace(piece.begin(), piece.end(), from, to);
  };
  join(source, ops.front());
  join(ops.back(), sink);
  for (auto o : ops)
    for (auto v : p.operations()[o].inputs)
      if (!p.is_source(v) && std::find(ops.begin(), ops.end(), p.producer(v)) != ops.end()) join(p.producer(v), o);
  std::vector<std::size_t> distinct = {piece[source], piece[sink]};
  for (auto o : ops)
    if (o != gone) distinct.push_back(piece[o]);
  std::sort(distinct.begin(), distinct.end());
  return static_cast<std::size_t>(std::unique(distinct.begin(), distinct.end()) - distinct.begin());
}

/// The solver's schedule with the least memory among budgets of a byte, two bytes, ...
template <class S>
result leanest(const problem& p, const S& s) {
  for (bytes_t budget = 1;; ++budget)
    if (auto r = solve(p, budget, s); r.found()) return r;
}

const std::vector<chen::variant> variants = {chen::variant::crossing, chen::variant::linearised,
                                             chen::variant::articulation_points, chen::variant::last_node};
const std::vector<chen::division> divisions = {chen::division::square_root, chen::division::equal, chen::division::greedy};

}  // namespace

TEST_CASE("articulation points are the operations whose removal leaves more pieces") {
  std::mt19937_64 g(41);
  int some = 0, none_found = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto p = random_problem(g, {.operations = 9, .outputs = 1, .inputs = 2, .density = 40});
    std::vector<index_t> ops;
    for (index_t o = 0; o < 9; ++o)
      if (chance(g, 80)) ops.push_back(o);
    if (ops.empty()) continue;
    const auto found = articulation_points(p, ops);
    for (auto o : ops) {
      INFO("round " << round << ", operation " << o);
      CHECK(std::binary_search(found.begin(), found.end(), o) == (pieces(p, ops, o) > pieces(p, ops, none)));
    }
    ++(found.empty() ? none_found : some);
  }
  CHECK(some > 500);
  CHECK(none_found > 10);
  CHECK(articulation_points(problem{}, {}).empty());
  const auto chain = unit_training_chain(20'000);  // deep
  std::vector<index_t> forward(20'000);
  for (index_t o = 0; o < forward.size(); ++o) forward[o] = o;
  CHECK(articulation_points(chain, forward) == forward);
}

TEST_CASE("chen on unit chains: costs of Checkmate's square-root and last-node baselines, in no more memory") {
  for (const auto& [n, cost, peak] : {std::tuple{4u, 11, 5}, {8u, 21, 7}, {16u, 45, 10}, {32u, 89, 14}})
    for (const auto v : {chen::variant::linearised, chen::variant::articulation_points}) {
      INFO("n " << n);
      const auto r = leanest(unit_training_chain(n), chen({.turn = n, .variant = v, .division = chen::division::square_root}));
      CHECK(r.seconds == cost);
      CHECK(r.peak <= peak);
      CHECK(r.peak >= peak - 3);
    }
  for (const auto& [n, cost] : {std::pair{4u, 19}, {8u, 53}, {16u, 169}, {32u, 593}}) {
    const auto r = leanest(unit_training_chain(n), chen({.variant = chen::variant::last_node}));
    CHECK(r.seconds == cost);
    CHECK(r.peak == 3);
  }
}

TEST_CASE("the default of chen is as fast as each of its variants") {
  std::mt19937_64 g(42);
  int found = 0;
  for (int round = 0; round < 200; ++round) {
    const auto p = round % 2 == 0 ? random_training_chain(g, 12) : random_problem(g, {.operations = 25, .once = 10});
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    const auto budget = all - (all - bounds_without_search(p).budget) / 2;
    const auto best = solve(p, budget, chen{});
    for (const auto v : variants)
      for (const auto d : divisions) {
        const auto r = solve(p, budget, chen({.variant = v, .division = d}));
        if (!r.found()) continue;
        ++found;
        REQUIRE(best.found());
        CHECK(best.seconds <= r.seconds);
      }
  }
  CHECK(found > 300);
}

TEST_CASE("chen checkpoints a transformer in about the square root of its memory") {
  const auto p = transformer_training_graph(16);
  const auto all = evaluate(p, store_all_schedule(p)).peak;
  for (const auto d : divisions) {
    const auto r =
        solve(p, p.held_bytes() + (all - p.held_bytes()) / 2, chen({.variant = chen::variant::crossing, .division = d}));
    REQUIRE(r.found());
    CHECK(r.seconds < 1.35 * p.total_seconds());
  }
}

TEST_CASE("recompute_all_blocks runs every block once more, up to the last value asked for") {
  const auto p = unit_training_chain(16);  // 33 nodes; the turn is after the loss
  const std::vector<index_t> cuts = {4, 8, 12};
  // v3, v7 and v11 pass from block to block; of the others v0 to v2, v4 to v6, v8 to v10, and the last block with the loss.
  const auto r = leanest(p, recompute_all_blocks({.cuts = cuts}));
  CHECK(r.seconds == 33 + 3 + 3 + 3 + 5);
  const auto kept = leanest(p, recompute_all_blocks({.cuts = cuts, .keep_last = true}));
  CHECK(kept.seconds == 33 + 3 + 3 + 3);
  const auto turned = leanest(p, recompute_all_blocks({.blocks = {.turn = 17}, .cuts = cuts}));
  CHECK(turned.schedule == r.schedule);
  CHECK(leanest(p, recompute_all_blocks({.blocks = {.least = 8}})).peak < 12);
  CHECK(solve(p, 18, recompute_all_blocks{}).seconds == 33);  // store-all fits
}

TEST_CASE("recompute_all_blocks costs a forward on networks") {
  const auto p = transformer_training_graph(8);
  const auto all = evaluate(p, store_all_schedule(p)).peak;
  const auto r = solve(p, all - 1, recompute_all_blocks{}), kept = solve(p, all - 1, recompute_all_blocks({.keep_last = true}));
  REQUIRE((r.found() && kept.found()));
  CHECK(r.seconds > 1.15 * p.total_seconds());
  CHECK(r.seconds < 1.4 * p.total_seconds());
  CHECK(kept.seconds < r.seconds);
  CHECK(r.peak < all / 2);
}

TEST_CASE("the baselines conform to what is asked of solvers") {
  for (const auto& failure : check_solver(chen{}, {.rounds = 800})) FAIL_CHECK(failure);
  for (const auto v : variants)
    for (const auto& failure : check_solver(chen({.variant = v}), {.rounds = 100, .seed = 2})) FAIL_CHECK(failure);
  for (const auto& failure : check_solver(recompute_all_blocks{}, {.rounds = 400})) FAIL_CHECK(failure);
  for (const auto& failure : check_solver(recompute_all_blocks({.blocks = {.least = 1}, .keep_last = true}), {.rounds = 400}))
    FAIL_CHECK(failure);
}

TEST_CASE("long chains are planned") {
  const auto p = unit_training_chain(1500);
  const auto r = solve(p, 90, chen{});
  REQUIRE(r.found());
  CHECK(r.seconds < 4600);
  const auto least = solve(p, 3, chen{});
  REQUIRE(least.found());
  CHECK(least.seconds == 1501 * 1502 / 2 + 1500);
  const auto torch = solve(p, 1000, recompute_all_blocks({.cuts = {300, 600, 900, 1200}}));
  REQUIRE(torch.found());
  CHECK(torch.seconds == 3001 + 4 * 299 + 301);
}

TEST_CASE("options of the baselines that are out of range are named") {
  const auto p = unit_training_chain(4);
  CHECK_THROWS_WITH(chen({.tries = 0}), Catch::Contains("chen.tries"));
  CHECK_THROWS_WITH(solve(p, 5, chen({.turn = 9})), Catch::Contains("chen.turn: no operation 9"));
  CHECK_THROWS_WITH(recompute_all_blocks({.cuts = {1, 3, 3}}), Catch::Contains("cuts[2] must be above 3, got 3"));
  CHECK_THROWS_WITH(solve(p, 5, recompute_all_blocks({.cuts = {1, 9}})), Catch::Contains("cuts: no operation 9"));
  CHECK_THROWS_WITH(solve(p, 5, recompute_all_blocks({.blocks = {.turn = 10}})), Catch::Contains("turn: no operation 10"));
  CHECK_THROWS_WITH(solve(p, 5, recompute_all_blocks({.blocks = {.interface = 0}})), Catch::Contains("interface"));
}
