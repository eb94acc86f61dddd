// SPDX-License-Identifier: Apache-2.0
// Planners for several tiers: weights, gradients and optimizers on a device, a host and a disk.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/tier_bound.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/core/smallest_budget.hpp>
#include <remat/core/solve.hpp>
#include <remat/order/lay_copies.hpp>
#include <remat/solver/offload_only.hpp>
#include <remat/solver/offmate.hpp>
#include <remat/testing/tier_oracle.hpp>

#include "../tiers.hpp"

using remat::bytes_t;
using remat::problem;
using remat::value_id;
using remat::testing::chance;
using remat::testing::random_step;
using remat::testing::random_tiers_problem;
using remat::testing::uniform;

namespace {

const remat::limits no_hurry{.seconds = std::numeric_limits<double>::infinity()};

/// A problem that can be planned.
problem tiers_problem(std::mt19937_64& g, bool step) {
  for (;;) {
    auto p = step ? random_step(g, {.layers = static_cast<std::size_t>(uniform(g, 1, 4)),
                                    .cyclic = chance(g, 50),
                                    .disk = 40 * static_cast<int>(uniform(g, 0, 1))})
                  : random_tiers_problem(g);
    if (!p.plain() && remat::order::unplannable(p).empty()) return p;
  }
}

/// The same with all rates so many times as high, and so many bytes more on each tier with a limit.
problem enlarged(const problem& p, double rate, bytes_t more) {
  auto tiers = p.tiers();
  auto copies = p.copies();
  std::vector<remat::copy_link> links(p.links_beyond_copies().begin(), p.links_beyond_copies().end());
  for (auto& l : links) l.rate *= rate;
  if (copies) copies->to_host *= rate, copies->to_device *= rate;
  for (std::size_t t = 1; t < tiers.size(); ++t)
    if (tiers[t].budget) *tiers[t].budget += more;
  return {"enlarged", p.values(), p.operations(), p.targets(), copies, std::nullopt, {tiers, links}, p.next()};
}

/// The same with another disk behind the last tier, where some of what starts there starts.
problem with_far_disk(std::mt19937_64& g, const problem& p) {
  auto values = p.values();
  auto tiers = p.tiers();
  std::vector<remat::copy_link> links(p.links_beyond_copies().begin(), p.links_beyond_copies().end());
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
  return {"far", values, p.operations(), p.targets(), p.copies(), std::nullopt, {tiers, links}, p.next()};
}

/// A problem with what nobody expects: no bytes or far too many, links and operations that take no time or never end, tiers
/// without room, operations anywhere, sources that start anywhere or that nobody reads. Nothing if it contradicts itself.
std::optional<problem> odd_problem(std::mt19937_64& g) {
  const auto p = tiers_problem(g, chance(g, 50));
  auto values = p.values();
  auto operations = p.operations();
  auto targets = p.targets();
  auto tiers = p.tiers();
  auto copies = p.copies();
  std::vector<remat::copy_link> links(p.links_beyond_copies().begin(), p.links_beyond_copies().end());
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
    return problem("odd", values, operations, targets, copies, std::nullopt, {tiers, links}, p.next());
  } catch (const remat::bad_problem&) {
    return {};
  }
}

}  // namespace

TEST_CASE("odd problems get an answer that is true") {
  int solved = 0;
  for (unsigned seed = 0; seed < 150; ++seed) {
    std::mt19937_64 g(seed);
    const auto p = odd_problem(g);
    if (!p) continue;
    INFO("seed " << seed);
    const auto least = remat::bounds_without_search(*p).budget;
    const auto budget = chance(g, 10) ? uniform(g, 0, 5) : chance(g, 10) ? remat::max_bytes : least + uniform(g, 0, 12);
    const remat::offmate<> joint(remat::min_cut{}, {.scan = 3, .search = 200, .idle = 1});
    const auto together = remat::solve(*p, budget, joint, no_hurry),
               alone = remat::solve(*p, budget, remat::offload_only(), no_hurry);
    for (const auto* r : {&together, &alone}) {
      CHECK_FALSE(std::isnan(r->bound));
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

TEST_CASE("no valid schedule on several tiers is faster than the bound") {
  std::mt19937_64 g(31);
  int compared = 0, met = 0, tight = 0;
  for (int round = 0; round < 3000; ++round) {
    const auto p = remat::testing::with_some_budgets(g, tiers_problem(g, round % 2 == 0), 70, 5, 30);
    auto s = remat::testing::tiers_walk(g, p).run();
    if (chance(g, 50))
      if (auto laid = remat::order::lay_copies(p, remat::needed_operations(p), remat::bounds_without_search(p).budget,
                                               {.frugal = true, .small = 0}))
        s = std::move(laid->schedule);
    const auto valid = remat::testing::evaluated(p, s);
    if (!valid) continue;
    const auto& e = *valid;
    INFO("round " << round);
    std::vector<std::optional<bytes_t>> peaks(e.peaks.begin(), e.peaks.end());
    peaks[remat::device_tier].reset();
    const auto bound = remat::bound::tier_bound(remat::testing::with_budgets(p, peaks), e.peak);
    REQUIRE(bound <= e.seconds * (1 + 1e-9) + 1e-9);
    ++compared;
    met += bound >= e.seconds - 1e-9;
    tight += bound > remat::bounds_without_search(p).seconds + 1e-9;
  }
  CAPTURE(compared, met, tight);
  CHECK(compared > 500);
  CHECK(met > 150);
  CHECK(tight > 1000);
}

TEST_CASE("what neither the device nor the host can hold goes to the disk: worked out by hand") {
  std::vector<remat::value> values = {{"x", 0}};  // 0, 2, 4 ..: one operation after the other
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
  // On the host: two of four, while others are made and read.
  const auto free = remat::solve(within(std::nullopt), 20, remat::offmate<>(), no_hurry);
  CHECK(free.seconds <= 10);
  CHECK(free.peaks[2] == 0);
  // One of them goes on to the disk and back, 10 s each way, of which one second is before the last two are made.
  const auto tight = remat::solve(within(10), 20, remat::offmate<>(), no_hurry);
  REQUIRE(tight.found());
  CHECK(tight.peaks == std::vector<bytes_t>{20, 10, 10});
  CHECK(tight.bound >= 20 * (1 - 1e-9));
  CHECK(tight.seconds <= 28);
}

TEST_CASE("weights that do not stay come twice: worked out by hand") {
  for (const bool frozen : {false, true}) {
    std::vector<remat::value> values;
    for (int i = 0; i < 3; ++i) values.push_back({.name = "w", .bytes = 10, .held = frozen, .starts = remat::testing::host});
    std::vector<remat::operation> operations;
    for (value_id w : {0, 1, 2, 2, 1, 0}) {
      std::vector<value_id> inputs = {w};
      if (!operations.empty()) inputs.push_back(values.size() - 1);
      values.push_back({"then", 0});
      operations.push_back({.name = "", .inputs = inputs, .outputs = {values.size() - 1}, .seconds = 1});
    }
    const problem p("weights", values, operations, {8}, remat::copy_rates{1, 1, 0});
    // There is room for one: the first two come again, 10 s each.
    CHECK(remat::bound::tier_bound(p, 10) >= 50 * (1 - 1e-9));
    const auto r = remat::solve(p, 10, remat::offmate<>(), no_hurry);
    REQUIRE(r.found());
    CHECK(r.seconds == Approx(56));
    // With room for two, one of them comes again; for all, none.
    CHECK(remat::bound::tier_bound(p, 20) == Approx(40));
    CHECK(remat::bound::tier_bound(p, 30) == Approx(34));
  }
}

TEST_CASE("tiers empty between steps: worked out by hand") {
  // Two weights on a disk, 4 s each from there to the host and 2 s to the device; a new one is made of each, on the device. The
  // second operation has read both, 8 s, before it makes anything, and both new ones take 4 s each to the disk.
  using remat::testing::disk;
  std::vector<remat::value> values;
  for (int i = 0; i < 2; ++i) values.push_back({.name = "w", .bytes = 4, .starts = disk});
  for (int i = 0; i < 2; ++i) values.push_back({.name = "w'", .bytes = 4, .ends = disk});
  values.push_back({"loss", 0});
  const std::vector<remat::operation> operations = {
      {.name = "forward", .inputs = {0, 1}, .outputs = {4}, .seconds = 1},
      {.name = "update", .inputs = {0, 4}, .outputs = {2}, .seconds = 1, .overwrites = {{2, 0}}},
      {.name = "update", .inputs = {1, 4}, .outputs = {3}, .seconds = 1, .overwrites = {{3, 1}}}};
  const problem p("steps", values, operations, {2, 3}, remat::copy_rates{2, 2, 0}, std::nullopt,
                  {{{"device"}, {"host"}, {"disk"}}, {{1, 2, 1}, {2, 1, 1}}}, {{2, 0}, {3, 1}});
  // Both are read, the second goes on to the device, then come the first two operations, and both are sent.
  CHECK(remat::bound::turn_bound(p) == Approx(8 + 2 + 1 + 1 + 2 + 8));
  const auto r = remat::solve(p, 100, remat::offmate<>(), no_hurry);
  REQUIRE(r.found());
  CHECK(r.status == remat::status::optimal);
}

TEST_CASE("what comes before anything is computed adds to what does not fit: worked out by hand") {
  // A weight comes to the device in 5 s; then three values of 10 bytes are made, and read in the opposite order.
  std::vector<remat::value> values = {{.name = "w", .bytes = 5, .starts = remat::testing::host}, {"begun", 0}};
  std::vector<remat::operation> operations = {{.name = "begin", .inputs = {0}, .outputs = {1}, .seconds = 1, .once = true}};
  std::vector<value_id> made;
  const auto add = [&](std::vector<value_id> inputs, bytes_t bytes) {
    inputs.push_back(operations.back().outputs.back());
    values.push_back({"made", bytes});
    values.push_back({"then", 0});
    operations.push_back(
        {.name = "", .inputs = inputs, .outputs = {values.size() - 2, values.size() - 1}, .seconds = 1, .once = true});
    return value_id(values.size() - 2);
  };
  for (int i = 0; i < 3; ++i) made.push_back(add({}, 10));
  for (int i = 3; i-- > 0;) add({made[static_cast<std::size_t>(i)]}, 0);
  const problem p("wait", values, operations, {values.size() - 1}, remat::copy_rates{10, 1, 0});
  // While the third is read there is room for one more: the other comes back in 10 s, after 5 + 1 + 3 s.
  CHECK(remat::bound::tier_bound(p, 20) >= 19 * (1 - 1e-9));
  const auto r = remat::solve(p, 20, remat::offmate<>(), no_hurry);
  REQUIRE(r.found());
  CHECK(r.seconds <= 21 * (1 + 1e-9));
}

TEST_CASE("planners for several tiers: valid, within all budgets, in order", "[long]") {
  std::mt19937_64 g(32);
  int found = 0, missed = 0, optimal = 0, better = 0, chained = 0, four = 0;
  const remat::offmate<> both(remat::min_cut{}, {.search = 5'000, .idle = 1});
  for (int round = 0; round < 400; ++round) {
    auto p = tiers_problem(g, round % 4 != 0);
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

TEST_CASE("more memory or rate on several tiers: schedules never take longer, and what is found hardly ever does", "[long]") {
  int compared = 0, slower = 0;
  const remat::offmate<> both(remat::min_cut{}, {.scan = 6, .search = 1'000, .idle = 1});
  for (unsigned seed = 0; seed < 150; ++seed) {
    std::mt19937_64 g(seed);
    auto p = tiers_problem(g, seed % 2 == 1);
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

TEST_CASE("the smallest budget on several tiers", "[long]") {
  std::mt19937_64 g(34);
  int met = 0, rounds = 0;
  const remat::offmate<> both(remat::min_cut{}, {.scan = 4, .search = 2'000, .idle = 1});
  for (int round = 0; round < 50; ++round) {
    const auto p = remat::testing::with_some_budgets(g, tiers_problem(g, round % 2 == 0), 30, 20, 60);
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

/// Plans against the optimum.
struct against_optimum {
  int solved = 0, infeasible = 0, given_up = 0, missed = 0, optimal = 0, proven = 0, chained = 0;
  double extra = 0, gap = 0;

  void add(const problem& p, bytes_t budget, std::size_t most_states) {
    const remat::offmate<> both(remat::min_cut{}, {.scan = 4, .search = 2'000, .idle = 1});
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
    const auto bound = remat::bound::tier_bound(p, budget);
    REQUIRE(bound <= best->seconds * (1 + 1e-9) + 1e-9);
    if (!r.found()) {
      REQUIRE(r.status != remat::status::infeasible);
      ++missed;
      return;
    }
    REQUIRE(r.seconds >= best->seconds - 1e-9);
    if (const auto plainest = remat::order::lay_copies(p, remat::needed_operations(p), budget, {.on_demand = true}))
      REQUIRE(r.seconds <= plainest->seconds * (1 + 1e-9));
    ++solved;
    chained += remat::order::tier_chain(p).size() > 2;
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

/// Small problems, of steps that repeat or of others.
/// @param one_in  of so many, one is of the first kind of `tiers_problem`
/// @param most    operations
/// @param states  that the exhaustive search may take
against_optimum small_against_optimum(unsigned seed, int rounds, int one_in, bool cyclic, std::size_t most, std::size_t states) {
  std::mt19937_64 g(seed);
  against_optimum all;
  for (int round = 0; round < rounds; ++round) {
    const auto p = tiers_problem(g, round % one_in == 0);
    if (p.next().empty() == cyclic || p.operations().size() > most || p.values().size() > 8) continue;
    INFO("round " << round);
    all.add(remat::testing::with_some_budgets(g, p, 50, 8, 24), remat::bounds_without_search(p).budget + uniform(g, 0, 6),
            states);
  }
  return all;
}

}  // namespace

TEST_CASE("small problems on two and three tiers against exhaustive search", "[long]") {
  const auto all = small_against_optimum(33, 6'000, 4, false, 4, 2'000);
  INFO(all.text());
  CHECK(all.solved > 600);
  CHECK(all.chained > 120);
  CHECK(300 * all.missed < all.solved);
  CHECK(10 * all.optimal > 9 * all.solved);
  CHECK(5 * all.proven > 4 * all.solved);
}

TEST_CASE("small steps that repeat against exhaustive search", "[long]") {
  const auto all = small_against_optimum(35, 2'500, 2, true, 3, 4'000);
  INFO(all.text());
  CHECK(all.solved > 120);
  CHECK(all.chained > 50);
  CHECK(all.missed == 0);
  CHECK(10 * all.optimal > 9 * all.solved);
  CHECK(3 * all.proven > 2 * all.solved);
}
