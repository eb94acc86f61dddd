// SPDX-License-Identifier: Apache-2.0
// Parts of a problem, their options, and the condensed problem, in which each part is a few operations.
#include <catch2/catch.hpp>

#include <random>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/hierarchy/condensed_problem.hpp>
#include <remat/hierarchy/part_problem.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/structure/partition.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"

using namespace remat;
using namespace remat::testing;

namespace {

/// `min_cut` with little effort.
min_cut quick() { return min_cut({.moments = 1, .cuts = 4, .mixtures = 1, .bound = false, .repairs = 1000, .effort = 0}); }

}  // namespace

TEST_CASE("find_partition gives disjoint parts, and a condensed schedule is a schedule of the whole") {
  std::mt19937_64 g(31);
  for (int round = 0; round < 300; ++round) {
    const auto p = round % 2 ? random_problem(g, {.operations = 40, .once = round % 3 ? 0 : 20})
                             : random_training_chain(g, static_cast<std::size_t>(3 + round % 17));
    const auto parts = structure::find_partition(p, {.size = static_cast<std::size_t>(3 + round % 9), .most = 12});
    CHECK(parts.size() <= 12);
    const hierarchy::part_index index(p, parts);  // throws if an operation is listed twice
    std::vector<hierarchy::part_option> ways;
    for (const auto& x : parts) {
      CHECK(x.size() > 1);
      const hierarchy::part_problem b(p, index, x);
      ways.push_back(b.measure(needed_operations(b.bare())));
    }
    std::vector<const hierarchy::part_option*> chosen;
    for (const auto& w : ways) chosen.push_back(&w);
    const hierarchy::condensed_problem c(p, index, chosen);
    REQUIRE(c.possible());
    // A schedule of the condensed problem is a schedule of the whole, with no larger peak and no more time.
    for (const auto budget : {max_bytes, share_of_peak(c.condensed(), .7), share_of_peak(c.condensed(), .5)}) {
      const auto r = solve(c.condensed(), budget, quick());
      if (!r.found()) continue;
      const auto whole = evaluate(p, with_drops(p, c.expand(p, compute_order(r.schedule))));
      REQUIRE(whole.peak <= r.peak);
      REQUIRE(whole.seconds <= r.seconds + 1e-9);
    }
  }
}

TEST_CASE("part_problem::measure gives the memory of the example in its comment") {
  // x -> a -> b -> c -> loss; the backward of the part reads a and the gradient of c.
  const problem p("example", {{"x", 1, true}, {"a", 10}, {"b", 30}, {"c", 5}, {"dc", 5}, {"da", 10}, {"dx", 1}},
                  {{"fa", {0}, {1}, 1},
                   {"fb", {1}, {2}, 1},
                   {"fc", {2}, {3}, 1},
                   {"loss", {3}, {4}, 1},
                   {"back", {1, 4}, {5}, 1},
                   {"end", {5}, {6}, 1}},
                  {6});
  const structure::partition parts = {{{0, 1, 2}, {4}}};
  const hierarchy::part_index index(p, parts);
  const hierarchy::part_problem b(p, index, parts[0]);
  const auto retained = b.measure({0, 1, 2, b.boundary(), 4});
  CHECK(retained.saved == 10);
  CHECK(retained.forward_workspace == 30);
  CHECK(retained.backward_workspace == 0);
  CHECK(retained.seconds == 4);
  const auto again = b.measure({0, 1, 2, b.boundary(), 0, 4});
  CHECK(again.saved == 0);
  CHECK(again.forward_workspace == 35);
  CHECK(again.backward_workspace == 10);
  const auto checkpoint = b.checkpoint();
  CHECK(checkpoint.forward == std::vector<operation_id>{0, 1, 2});
  CHECK(checkpoint.backward.empty());
  CHECK(checkpoint.saved == 0);
  CHECK(checkpoint.forward_workspace == 35);
}
