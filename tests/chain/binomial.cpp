// SPDX-License-Identifier: Apache-2.0
// Binomial checkpointing and its generalisation to unequal links, as tables.
#include <catch2/catch.hpp>

#include <algorithm>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <remat/chain/binomial.hpp>
#include <remat/chain/persistent_table.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/hierarchy/part_chain.hpp>
#include <remat/structure/partition.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using namespace remat::testing;

namespace {

/// The least time of `persistent_table` with `inputs_only` for links i to j in m bytes, evaluated directly from its recurrence.
double least(const chain::heterogeneous_chain& c, std::size_t i, std::size_t j, bytes_t m) {
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

TEST_CASE("revolve_forwards equals the recursion of Griewank and Walther") {
  constexpr std::size_t most = 80;
  std::vector<std::vector<std::uint64_t>> t(most + 1, std::vector<std::uint64_t>(12, 0));
  for (std::size_t l = 2; l <= most; ++l)
    for (std::size_t s = 1; s < 12; ++s) {
      t[l][s] = l * (l - 1) / 2;
      for (std::size_t m = 1; s > 1 && m < l; ++m) t[l][s] = std::min<std::uint64_t>(t[l][s], m + t[l - m][s - 1] + t[m][s]);
    }
  for (std::size_t l = 1; l <= most; ++l)
    for (std::size_t s = 1; s < 12; ++s) CHECK(chain::revolve_forwards(l, s) == t[l][s]);
  CHECK(chain::revolve_forwards(1000, 1000) == 999);
  CHECK(chain::revolve_forwards(1000, 1'000'000'000'000) == 999);
  constexpr auto largest = std::uint64_t{1} << 31;
  CHECK(chain::revolve_forwards(largest, 1) == largest * (largest - 1) / 2);
  CHECK(chain::revolve_forwards(largest, largest) == largest - 1);
  CHECK(chain::revolve_forwards(largest, largest - 2) == 2 * largest - largest);  // one step twice
  CHECK_THROWS_WITH(chain::revolve_forwards(0, 1), Catch::Contains("steps must be in [1, 2^31], got 0"));
  CHECK_THROWS_WITH(chain::revolve_forwards(largest + 1, 1), Catch::Contains("steps"));
  CHECK_THROWS_WITH(chain::revolve_forwards(1, 0), Catch::Contains("slots must be >= 1, got 0"));
}

TEST_CASE("binomial schedules have the steps and slots of the closed form, for chains of any length") {
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
    const auto steps = chain::revolve_schedule(links, slots);
    // From the end: state i is wanted from the step that makes it (the beginning for state 0) to its last use.
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
        case chain::chain_step::kind::backward:  // the last link first
          valid = valid && s.link == next++ && k > 0 &&
                  steps[k - 1] == chain::chain_step{chain::chain_step::kind::forward, s.link, 0};
          break;
        case chain::chain_step::kind::forward:
          set(s.link, true);
          break;
        case chain::chain_step::kind::checkpoint:
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
    CHECK(checkpoints == chain::revolve_forwards(links, slots));
    CHECK(most <= slots + 1);  // one more: the state that is being moved
  }
  CHECK_THROWS_WITH(chain::revolve_schedule(3, 0), Catch::Contains("slots"));
}

TEST_CASE("the table for unequal links equals its recurrence, and its schedules keep their time and memory") {
  std::mt19937_64 g(43);
  int points = 0;
  for (int round = 0; round < 60; ++round) {
    const auto p = random_training_chain(g, static_cast<std::size_t>(uniform(g, 2, 7)));
    const hierarchy::saved_parts parts(p, structure::find_partition(p, {.size = 1, .interface = 1}));
    if (parts.size() < 2) continue;
    const auto& joint = parts.chain();
    const auto most = 2 * evaluate(p, store_all_schedule(p)).peak;
    const chain::persistent_table exact(joint.model(), most, {.inputs_only = true}),
        rough(joint.model(), most, {.slots = 20, .inputs_only = true});
    const auto& c = joint.model();
    const auto front = exact.front();
    REQUIRE_FALSE(front.empty());
    for (std::size_t i = 0; i < front.size(); ++i) {
      const auto& [budget, seconds] = front[i];
      const auto n = c.links.size() - 1;
      CHECK(least(c, 0, n, budget - c.links[0].input) == Approx(seconds));
      CHECK(least(c, 0, n, budget - 1 - c.links[0].input) > seconds + 1e-9);
      const auto needs = measure_order(p, joint.order(exact.steps(budget)));
      CHECK(needs.seconds <= seconds + 1e-9);
      CHECK(needs.peak <= budget + joint.unmodelled_bytes());
      ++points;
    }
    for (const auto& [budget, seconds] : rough.front()) {
      const auto needs = measure_order(p, joint.order(rough.steps(budget)));
      CHECK(needs.peak <= budget + joint.unmodelled_bytes());
      CHECK(seconds >= least(c, 0, c.links.size() - 1, budget - c.links[0].input) - 1e-9);
    }
  }
  CHECK(points > 100);
}

TEST_CASE("an interrupted table, a table with too few bytes and a table without links have no points") {
  const auto p = unit_training_chain(9);
  const hierarchy::saved_parts parts(p, structure::find_partition(p, {.size = 1, .interface = 1}));
  const auto& joint = parts.chain();
  CHECK(chain::persistent_table(joint.model(), 20, {.slots = 20, .stop = [] { return true; }, .inputs_only = true})
            .front()
            .empty());
  CHECK(chain::persistent_table(joint.model(), 0, {.slots = 20, .inputs_only = true}).front().empty());
  CHECK(chain::persistent_table(chain::heterogeneous_chain{}, 20, {.inputs_only = true}).front().empty());
}
