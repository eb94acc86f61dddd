// SPDX-License-Identifier: Apache-2.0
// Recomputation and offloading for a chain of blocks.
#include <catch2/catch.hpp>

#include <algorithm>
#include <limits>
#include <random>

#include <remat/solver/offmate.hpp>
#include <remat/solver/pofo.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/tier_oracle.hpp>

#include "../instances.hpp"
#include "../rounds.hpp"

using namespace remat;
using namespace remat::testing;

static_assert(solver<pofo>);

namespace {

constexpr auto no_end = std::numeric_limits<double>::infinity();

/// Blocks of one forward and one backward each. The backward reads the input of the block, its output, or both.
problem small_chain(std::mt19937_64& g, std::size_t blocks) {
  std::vector<value> values = {{"x0", 1, true}};
  std::vector<operation> operations;
  std::vector<value_id> x = {0};
  const auto make = [&](std::string name, std::vector<value_id> inputs, double seconds) {
    const auto v = static_cast<value_id>(static_cast<index_t>(values.size()));
    values.push_back({name, uniform(g, 1, 2)});
    operations.push_back({name, std::move(inputs), {v}, seconds, uniform(g, 0, 1)});
    return v;
  };
  const auto seconds = [&] { return static_cast<double>(uniform(g, 1, 4)); };
  for (std::size_t i = 0; i < blocks; ++i) x.push_back(make("f" + std::to_string(i), {x.back()}, seconds()));
  value_id gradient = make("loss", {x.back()}, seconds());
  const auto backward_start = static_cast<operation_id>(static_cast<index_t>(operations.size()));
  for (auto i = blocks; i-- > 1;) {
    std::vector<value_id> inputs = {gradient};
    const auto reads = uniform(g, 0, 2);
    if (reads != 1) inputs.push_back(x[i]);
    if (reads != 0) inputs.push_back(x[i + 1]);
    gradient = make("b" + std::to_string(i), std::move(inputs), seconds());
  }
  return {"small chain", std::move(values), std::move(operations), {gradient}, std::nullopt, backward_start};
}

bool computes_again(const result& r) { return r.recomputed > 0; }
bool has_copies(const result& r) {
  return std::any_of(r.schedule.steps.begin(), r.schedule.steps.end(), [](const step& s) { return s.what == action::prefetch; });
}

}  // namespace

TEST_CASE("pofo passes the conformance suite") {
  for (const auto& failure : check_solver(pofo{}, {.rounds = shortened(300)})) FAIL_CHECK(failure);
}

TEST_CASE("pofo on thousands of small chains is never below the optimum, and often optimal") {
  std::mt19937_64 g(41);
  int compared = 0, met = 0, false_claims = 0, copied = 0;
  for (int round = 0; round < shortened(2000); ++round) {
    const auto plain = small_chain(g, static_cast<std::size_t>(uniform(g, 2, 3)));
    const auto rate = [&] { return static_cast<double>(uniform(g, 1, 2)); };
    const auto p = plain.with_copies(copy_rates{rate(), rate(), 0});
    const auto least = bounds_without_search(p).budget;
    const auto all = share_of_peak(p, 1);
    if (least >= all) continue;
    const auto budget = uniform(g, least, all - 1);
    const auto optimum = exhaustive_optimum_on_tiers(p, budget, 4000);
    if (!optimum) continue;
    const auto r = solve(p, budget, pofo{}, {.gap = 0});
    INFO("round " << round << ", budget " << budget);
    REQUIRE(r.bound <= optimum->seconds + 1e-5);
    if (!r.found()) {
      CHECK(r.status == (r.reason.empty() ? status::not_found : status::not_applicable));
      continue;
    }
    REQUIRE(r.seconds >= optimum->seconds - 1e-5);
    false_claims += r.status == status::optimal && r.seconds > optimum->seconds + 1e-5;
    ++compared;
    copied += has_copies(r);
    met += r.seconds <= optimum->seconds + 1e-5;
  }
  CAPTURE(compared, met, copied);
  CHECK(false_claims == 0);
  CHECK(compared > shortened(90));
  CHECK(copied > shortened(90));
  CHECK(3 * met > compared);
}

TEST_CASE("pofo on longer chains recomputes and copies, and is near offmate", "[long]") {
  std::mt19937_64 g(42);
  int found = 0, both = 0, alone = 0;
  double ours = 0, joint = 0;
  for (int round = 0; round < 30; ++round) {
    const auto plain = random_training_chain(g, static_cast<std::size_t>(uniform(g, 6, 24)));
    const double rate = 0.25 * static_cast<double>(uniform(g, 1, 12));
    const auto p = plain.with_copies(copy_rates{rate, rate, 0});
    const auto budget = share_of_peak(p, 0.01 * static_cast<double>(uniform(g, 35, 90)));
    const auto r = solve(p, budget, pofo{});
    const auto other = solve(p, budget, offmate<>(min_cut{}, {.effort = 1000, .idle = 1}), {.seconds = no_end});
    if (!r.found()) continue;
    ++found;
    both += has_copies(r) && computes_again(r);
    alone += !has_copies(r) || !computes_again(r);
    CHECK(r.seconds >= other.bound - 1e-9);
    ours += r.seconds / p.total_seconds();
    joint += other.seconds / p.total_seconds();
  }
  CAPTURE(found, both, alone, ours / found, joint / found);
  CHECK(found > 20);
  CHECK(both > 5);
  CHECK(joint <= ours * 1.001);
  CHECK(ours <= joint * 1.15);
}

TEST_CASE("pofo on a captured network, with a dead link and with a fast link") {
  const auto plain = instance("gpt2-layers-2-seq-256");
  const auto budget = share_of_peak(plain, 0.6);
  const auto with = [&](double rate) { return plain.with_copies(copy_rates{rate, rate, 0}); };
  const auto fast = solve(with(1e18), budget, pofo{}), dead = solve(with(1), budget, pofo{});
  REQUIRE((fast.found() && dead.found()));
  CHECK(fast.seconds == Approx(plain.total_seconds()));
  CHECK_FALSE(has_copies(dead));
  CHECK(computes_again(dead));
}

TEST_CASE("pofo refuses problems without copies, and options that are out of range") {
  std::mt19937_64 g(43);
  const auto chain = random_training_chain(g, 8);
  const auto budget = share_of_peak(chain, 0.7);
  const auto still = solve(chain, budget, pofo{});
  CHECK(still.status == status::not_applicable);
  CHECK(still.reason.find("no copies") != still.reason.npos);
  CHECK(solve(chain, share_of_peak(chain, 1), pofo{}).found());
  const auto p = chain.with_copies(copy_rates{1, 1, 0});
  CHECK_THROWS_WITH(pofo({.blocks = {.most = 5000}}), Catch::Contains("pofo.blocks.most"));
  CHECK_THROWS_WITH(pofo({.slots = 0}), Catch::Contains("pofo.slots"));
  CHECK_THROWS_WITH(pofo({.labels = 0}), Catch::Contains("pofo.labels"));
  CHECK_THROWS_WITH(pofo({.nearby = {0}}), Catch::Contains("pofo.nearby"));
  CHECK_THROWS_WITH(pofo({.nearby = {2e6}}), Catch::Contains("pofo.nearby must be in (0, 10^6), got 2000000"));
  CHECK_THROWS_WITH(solve(p, budget, pofo({.blocks = {.most = 0}})), Catch::Contains("most"));
  const auto stopped = solve(p, budget, pofo{}, {}, [](const progress&) { return control::stop; });
  CHECK((stopped.found() || stopped.status == status::time_limit));
}
