// SPDX-License-Identifier: Apache-2.0
// Solvers on several tiers: weights, gradients and optimizer states on a device, a host and a disk.
#include <catch2/catch.hpp>

#include <cmath>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <remat/copies/schedule_copies.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/solver/offmate.hpp>
#include <remat/testing/tier_oracle.hpp>
#include <remat/tiers/tier_bound.hpp>

#include "../tiers.hpp"

using remat::bytes_t;
using remat::problem;
using remat::value_id;
using remat::testing::chance;
using remat::testing::no_hurry;
using remat::testing::plannable_problem;
using remat::testing::uniform;

namespace {

/// The problem with all rates times `rate`, and `more` bytes on each tier with a budget.
problem enlarged(const problem& p, double rate, bytes_t more) {
  auto x = p.members();
  for (auto& l : x.system.links) l.rate *= rate;
  if (x.copies) x.copies->to_host *= rate, x.copies->to_device *= rate;
  for (auto& t : x.system.tiers)
    if (t.budget) *t.budget += more;
  return problem(std::move(x));
}

/// The problem with another disk behind the last tier, where some of the sources of the last tier start.
problem with_far_disk(std::mt19937_64& g, const problem& p) {
  auto x = p.members();
  auto& [tiers, links] = x.system;
  auto& values = x.values;
  const remat::tier_id last(tiers.size() - 1), far(tiers.size());
  tiers.push_back({"far disk"});
  links.push_back({last, far, 1, 0});
  links.push_back({far, last, 0.5, 0.25});
  std::vector<bool> carried(values.size(), false);
  for (const auto& c : p.next()) carried[c.source] = carried[c.target] = true;
  for (value_id v = 0; v < values.size(); ++v) {
    if (carried[v] || !chance(g, 50)) continue;
    if (p.is_source(v) && values[v].starts == last) values[v].starts = far;
    if (p.is_target(v) && values[v].ends == last) values[v].ends = far;
  }
  return problem(std::move(x));
}

/// A problem at the limits: sizes of zero or far too large, links and operations that take no time or nearly forever, tiers
/// without room, operations on any tier, sources that start anywhere or are never read. Nothing if the problem is inconsistent.
std::optional<problem> odd_problem(std::mt19937_64& g) {
  const auto p = plannable_problem(g, chance(g, 50));
  auto x = p.members();
  auto& [name, values, operations, targets, copies, backward, system, next] = x;
  auto& [tiers, links] = system;
  const auto one_of = [&](const auto& list) {
    return list[static_cast<std::size_t>(uniform(g, 0, static_cast<long>(std::size(list)) - 1))];
  };
  const double rates[] = {1e30, 1e-30, 1e300, 1, 1e9, 5e-324}, times[] = {0, 1, 1e300};
  const bytes_t sizes[] = {0, 1, 3, bytes_t{1} << 40, (bytes_t{1} << 50) - 1};
  if (chance(g, 40)) {
    const auto size = one_of(sizes);
    for (auto& v : values) v.bytes = size;
  }
  if (chance(g, 50)) {
    for (auto& l : links) l.rate = chance(g, 50) ? one_of(rates) : l.rate;
    if (copies) copies->to_host = one_of(rates), copies->to_device = one_of(rates);
  }
  if (chance(g, 30))
    for (auto& l : links) l.latency = one_of(times);
  if (chance(g, 30))
    for (auto& l : links) l.stream = "bus";
  if (chance(g, 50))
    for (std::size_t t = 1; t < tiers.size(); ++t) tiers[t].budget = chance(g, 50) ? 0 : uniform(g, 0, 30);
  for (auto& o : operations) {
    if (chance(g, 10)) o.on = remat::tier_id(static_cast<std::size_t>(uniform(g, 0, static_cast<long>(tiers.size()) - 1)));
    if (chance(g, 10)) o.seconds = one_of(times);
  }
  if (chance(g, 50))
    for (value_id v = 0; v < p.values().size(); ++v) {
      if (p.is_source(v)) values[v].starts = remat::any_tier;
      if (p.is_target(v) && chance(g, 50)) values[v].ends = remat::any_tier;
    }
  if (chance(g, 50)) {
    values.push_back({.name = "never read", .bytes = uniform(g, 0, 9), .starts = remat::any_tier});
    values.push_back({.name = "source and target", .bytes = 3, .starts = remat::any_tier, .ends = remat::any_tier});
    targets.push_back(values.size() - 1);
  }
  try {
    return problem(std::move(x));
  } catch (const remat::bad_problem&) {
    return {};
  }
}

}  // namespace

TEST_CASE("solvers give valid answers for odd problems on several tiers") {
  int solved = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    std::mt19937_64 g(seed);
    const auto p = odd_problem(g);
    if (!p) continue;
    INFO("seed " << seed);
    const auto least = remat::bounds_without_search(*p).budget;
    const auto budget = chance(g, 10) ? uniform(g, 0, 5) : chance(g, 10) ? remat::max_bytes : least + uniform(g, 0, 12);
    const remat::offmate<> joint(remat::min_cut{}, {.scan = 3, .effort = 200, .idle = 1});
    const auto together = remat::solve(*p, budget, joint, no_hurry),
               alone = remat::solve(*p, budget, remat::offload_only(), no_hurry);
    for (const auto* r : {&together, &alone}) {
      CHECK(std::isfinite(r->bound));
      if (r->status == remat::status::not_applicable) CHECK_FALSE(r->reason.empty());
      if (!r->found()) continue;
      CHECK(remat::evaluate(*p, r->schedule).peak <= budget);
      CHECK(std::isfinite(r->seconds));
      CHECK(r->bound <= r->seconds * (1 + 1e-9));
    }
    if (alone.found()) {
      REQUIRE(together.found());
      CHECK(together.seconds <= alone.seconds * (1 + 1e-9));
      ++solved;
    }
  }
  CHECK(solved >= 40);
}

TEST_CASE("values that fit neither device nor host go to the disk, as worked out by hand") {
  std::vector<remat::value> values = {{"x", 0}};  // values 0, 2, 4, ... force one operation after the other
  std::vector<remat::operation> operations;
  const auto add = [&](std::vector<value_id> inputs, bytes_t made) {
    inputs.push_back((values.size() - 1) / 2 * 2);
    values.push_back({"made", made});
    values.push_back({"then", 0});
    operations.push_back(
        {.name = "", .inputs = inputs, .outputs = {values.size() - 2, values.size() - 1}, .seconds = 1, .once = true});
  };
  for (int i = 0; i < 4; ++i) add({}, 10);
  for (value_id v : {7, 5, 3, 1}) add({v}, 0);
  const auto within = [&](std::optional<bytes_t> host_budget) {
    return problem("stack", values, operations, {16}, remat::copy_rates{10, 10, 0}, std::nullopt,
                   {{{"device"}, {"host", host_budget}, {"disk"}}, {{1, 2, 1}, {2, 1, 1}}});
  };
  // On the host: two of the four values, while the others are made and read.
  const auto free = remat::solve(within(std::nullopt), 20, remat::offmate<>(), no_hurry);
  CHECK(free.seconds <= 10);
  CHECK(free.peaks[2] == 0);
  // One of them goes on to the disk and back, 10 s each way, of which one second passes before the last two are made.
  const auto tight = remat::solve(within(10), 20, remat::offmate<>(), no_hurry);
  REQUIRE(tight.found());
  CHECK(tight.peaks == std::vector<bytes_t>{20, 10, 10});
  CHECK(tight.bound >= 20 * (1 - 1e-9));
  CHECK(tight.seconds <= 28);
}

TEST_CASE("solvers on several tiers: valid schedules within all budgets, and bounds in order", "[long]") {
  std::mt19937_64 g(32);
  int found = 0, missed = 0, optimal = 0, better = 0, chained = 0, four = 0;
  const remat::offmate<> both(remat::min_cut{}, {.effort = 5'000, .idle = 1});
  for (int round = 0; round < 400; ++round) {
    auto p = plannable_problem(g, round % 4 != 0);
    if (p.tiers().size() == 3 && chance(g, 40)) p = with_far_disk(g, p);
    if (chance(g, 20)) p = remat::testing::with_some_budgets(g, p, 70, 20, 60);
    const auto least = remat::bounds_without_search(p).budget;
    INFO("round " << round);
    if (least > 0) CHECK(remat::solve(p, least - 1, both, no_hurry).status == remat::status::infeasible);
    const auto budget = least + uniform(g, 0, 12);
    const auto r = remat::solve(p, budget, both, no_hurry), copied = remat::solve(p, budget, remat::offload_only(), no_hurry);
    CHECK(r.status != remat::status::infeasible);
    if (copied.found()) REQUIRE(r.found());
    r.found() ? ++found : ++missed;
    if (!r.found()) continue;
    CHECK(r.peak <= budget);
    for (std::size_t t = 1; t < p.tiers().size(); ++t) CHECK((!p.tiers()[t].budget || r.peaks[t] <= *p.tiers()[t].budget));
    chained += p.tiers().size() > 2;
    four += p.tiers().size() > 3;
    CHECK(r.bound <= r.seconds * (1 + 1e-9));
    if (copied.found()) CHECK(r.seconds <= copied.seconds * (1 + 1e-9));
    optimal += r.status == remat::status::optimal;
    better += !copied.found() || r.seconds < copied.seconds * (1 - 1e-9);
  }
  CAPTURE(found, missed, optimal, better, chained, four);
  CHECK(chained > 150);
  CHECK(four > 50);
  CHECK(found > 350);
  CHECK(optimal > 50);
  CHECK(better > 40);
}

TEST_CASE("with more memory or faster links on several tiers, schedules are never slower and searches rarely are", "[long]") {
  int compared = 0, slower = 0;
  const remat::offmate<> both(remat::min_cut{}, {.scan = 6, .effort = 1'000, .idle = 1});
  for (unsigned seed = 0; seed < 150; ++seed) {
    std::mt19937_64 g(seed);
    auto p = plannable_problem(g, seed % 2 == 1);
    if (chance(g, 60)) p = remat::testing::with_some_budgets(g, p, 70, 5, 30);
    const auto budget = remat::bounds_without_search(p).budget + uniform(g, 0, 8);
    const auto r = remat::solve(p, budget, both, no_hurry);
    if (!r.found()) continue;
    INFO("seed " << seed);
    for (const auto& [q, within] :
         {std::pair(enlarged(p, 2, 0), budget), std::pair(enlarged(p, 1, 7), budget), std::pair(p, budget + 5)}) {
      CHECK(remat::evaluate(q, r.schedule).seconds <= r.seconds * (1 + 1e-9));
      const auto more = remat::solve(q, within, both, no_hurry);
      REQUIRE(more.found());
      CHECK(more.seconds <= r.seconds * 1.25);
      slower += more.seconds > r.seconds * (1 + 1e-9);
      ++compared;
    }
  }
  CAPTURE(compared, slower);
  CHECK(compared > 250);
  CHECK(slower * 50 <= compared);
}

TEST_CASE("smallest_budget on several tiers", "[long]") {
  std::mt19937_64 g(34);
  int met = 0, rounds = 0;
  const remat::offmate<> both(remat::min_cut{}, {.scan = 4, .effort = 2'000, .idle = 1});
  for (int round = 0; round < 50; ++round) {
    const auto p = remat::testing::with_some_budgets(g, plannable_problem(g, round % 2 == 0), 30, 20, 60);
    INFO("round " << round);
    const auto r = remat::smallest_budget(p, both, no_hurry, 0.001);
    if (!r.found()) continue;
    const auto e = remat::evaluate(p, r.schedule);
    CHECK(e.peak == r.peak);
    CHECK((r.budget == r.peak && r.smallest_budget == r.peak));
    CHECK(r.budget_bound <= r.peak);
    CHECK(r.budget_bound >= remat::bounds_without_search(p).budget);
    if (r.peak > 0 && r.budget_bound == r.peak)
      CHECK(remat::solve(p, r.peak - 1, both, no_hurry).status == remat::status::infeasible);
    met += r.budget_bound == r.peak;
    ++rounds;
  }
  CAPTURE(rounds, met);
  CHECK(rounds > 40);
  CHECK(met > 25);
}

namespace {

/// Statistics of plans compared with the optimum.
struct against_optimum {
  int solved = 0, infeasible = 0, given_up = 0, missed = 0, optimal = 0, proven = 0, chained = 0;
  double extra = 0, gap = 0;

  void add(const problem& p, bytes_t budget, std::size_t most_states) {
    const remat::offmate<> both(remat::min_cut{}, {.scan = 4, .effort = 2'000, .idle = 1});
    const auto best = remat::testing::exhaustive_optimum_on_tiers(p, budget, most_states);
    if (!best) {
      ++given_up;
      return;
    }
    const auto r = remat::solve(p, budget, both, no_hurry);
    if (std::isinf(best->seconds)) {
      ++infeasible;
      REQUIRE_FALSE(r.found());
      return;
    }
    const auto e = remat::evaluate(p, best->best);
    REQUIRE(e.peak <= budget);
    REQUIRE(e.seconds == Approx(best->seconds));
    const auto bound = remat::tiers::tier_bound(p, budget);
    REQUIRE(bound <= best->seconds * (1 + 1e-9) + 1e-9);
    if (!r.found()) {
      REQUIRE(r.status != remat::status::infeasible);
      ++missed;
      return;
    }
    REQUIRE(r.seconds >= best->seconds - 1e-9);
    if (const auto plainest = remat::copies::schedule_copies(p, remat::needed_operations(p), budget, {.on_demand = true}))
      REQUIRE(r.seconds <= plainest->seconds * (1 + 1e-9));
    ++solved;
    chained += remat::copies::tier_chain(p).size() > 2;
    optimal += r.seconds <= best->seconds + 1e-9;
    proven += bound >= best->seconds - 1e-9;
    if (best->seconds > 0) extra += r.seconds / best->seconds - 1, gap += 1 - bound / best->seconds;
  }
  std::string text() const {
    std::ostringstream out;
    out << solved << " solved, " << infeasible << " infeasible, " << given_up << " given up, " << missed << " missed, " << optimal
        << " optimal, " << proven << " proven, " << chained << " chained; on average " << extra / solved << " more, bound "
        << gap / solved << " less";
    return out.str();
  }
};

/// Compares plans with the optimum on small problems, cyclic or not.
/// @param one_in  one problem in `one_in` is of the first kind of `tiers_problem`
/// @param most    largest number of operations
/// @param states  limit on the states of the exhaustive search
against_optimum small_against_optimum(unsigned seed, int rounds, int one_in, bool cyclic, std::size_t most, std::size_t states) {
  std::mt19937_64 g(seed);
  against_optimum all;
  for (int round = 0; round < rounds; ++round) {
    const auto p = plannable_problem(g, round % one_in == 0);
    if (p.next().empty() == cyclic || p.operations().size() > most || p.values().size() > 8) continue;
    INFO("round " << round);
    all.add(remat::testing::with_some_budgets(g, p, 50, 8, 24), remat::bounds_without_search(p).budget + uniform(g, 0, 6),
            states);
  }
  return all;
}

}  // namespace

TEST_CASE("offmate on small problems on two and three tiers is near the exhaustive optimum", "[long]") {
  const auto all = small_against_optimum(33, 6'000, 4, false, 4, 2'000);
  INFO(all.text());
  CHECK(all.solved > 600);
  CHECK(all.chained > 120);
  CHECK(300 * all.missed < all.solved);
  CHECK(10 * all.optimal > 9 * all.solved);
  CHECK(5 * all.proven > 4 * all.solved);
}

TEST_CASE("offmate on small repeated steps is near the exhaustive optimum", "[long]") {
  const auto all = small_against_optimum(35, 2'500, 2, true, 3, 4'000);
  INFO(all.text());
  CHECK(all.solved > 120);
  CHECK(all.chained > 50);
  CHECK(all.missed == 0);
  CHECK(10 * all.optimal > 9 * all.solved);
  CHECK(3 * all.proven > 2 * all.solved);
}
