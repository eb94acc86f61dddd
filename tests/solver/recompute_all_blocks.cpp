// SPDX-License-Identifier: Apache-2.0
// Checkpoints at the ends of blocks.
#include <catch2/catch.hpp>

#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/recompute_all_blocks.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<recompute_all_blocks>);

TEST_CASE("recompute_all_blocks runs every block a second time, up to the last value that is needed") {
  const auto p = unit_training_chain(16);  // 33 nodes; the backward begins after the loss
  const std::vector<operation_id> cuts = {4, 8, 12};
  // The block boundaries v3, v7 and v11 are kept. Recomputed are v0 to v2, v4 to v6, v8 to v10, and the last block with the loss.
  const auto r = leanest(p, recompute_all_blocks({.cuts = cuts}));
  CHECK(r.seconds == 33 + 3 + 3 + 3 + 5);
  const auto kept = leanest(p, recompute_all_blocks({.cuts = cuts, .keep_last = true}));
  CHECK(kept.seconds == 33 + 3 + 3 + 3);
  const auto turned = leanest(p, recompute_all_blocks({.blocks = {.backward_start = 17}, .cuts = cuts}));
  CHECK(turned.schedule == r.schedule);
  CHECK(leanest(p, recompute_all_blocks({.blocks = {.size = 8, .interface = 1}})).peak < 12);
  CHECK(solve(p, 18, recompute_all_blocks{}).seconds == 33);  // store-all fits
}

TEST_CASE("recompute_all_blocks takes about one more forward on networks") {
  const auto p = transformer_training_graph(8);
  const auto all = evaluate(p, store_all_schedule(p)).peak;
  const auto r = solve(p, all - 1, recompute_all_blocks{}), kept = solve(p, all - 1, recompute_all_blocks({.keep_last = true}));
  REQUIRE((r.found() && kept.found()));
  CHECK(r.seconds > 1.15 * p.total_seconds());
  CHECK(r.seconds < 1.4 * p.total_seconds());
  CHECK(kept.seconds < r.seconds);
  CHECK(r.peak < all / 2);
}

TEST_CASE("recompute_all_blocks passes the conformance suite") {
  for (const auto& failure : check_solver(recompute_all_blocks{}, {.rounds = shortened(400)})) FAIL_CHECK(failure);
  for (const auto& failure :
       check_solver(recompute_all_blocks({.blocks = {.size = 1, .interface = 1}, .keep_last = true}), {.rounds = shortened(400)}))
    FAIL_CHECK(failure);
}

TEST_CASE("recompute_all_blocks on a chain of 1500 layers") {
  const auto p = unit_training_chain(1500);
  const auto torch = solve(p, 1000, recompute_all_blocks({.cuts = {300, 600, 900, 1200}}));
  REQUIRE(torch.found());
  CHECK(torch.seconds == 3001 + 4 * 299 + 301);
}

TEST_CASE("options of recompute_all_blocks that are out of range are named") {
  const auto p = unit_training_chain(4);
  CHECK_THROWS_WITH(recompute_all_blocks({.cuts = {1, 3, 3}}), Catch::Contains("cuts[2] must be above 3, got 3"));
  CHECK_THROWS_WITH(solve(p, 5, recompute_all_blocks({.cuts = {1, 9}})), Catch::Contains("cuts: no operation 9"));
  CHECK_THROWS_WITH(solve(p, 5, recompute_all_blocks({.blocks = {.backward_start = 10}})),
                    Catch::Contains("backward_start: no operation 10"));
  CHECK_THROWS_WITH(solve(p, 5, recompute_all_blocks({.blocks = {.size = 0}})), Catch::Contains("size"));
}
