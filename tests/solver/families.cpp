// SPDX-License-Identifier: Apache-2.0
// Large graphs of many shapes: methods find a first schedule even if they must stop at once, recursion depth does not grow with
// the input, and errors for too large problems name the limit.
#include <catch2/catch.hpp>

#include <string>
#include <utility>

#include <remat/core/solve.hpp>
#include <remat/solver/automatic_milp.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/checkmate_rounding.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/moments.hpp>
#include <remat/solver/twremat.hpp>

#include "../families.hpp"
#include "../rounds.hpp"

using namespace remat;

namespace {

/// The smallest peak among the cheap orders, bytes.
bytes_t leanest_cheap(const problem& p) {
  monitor m({.seconds = 1e9});
  incumbent none_fits(p, bounds_without_search(p).budget - 1);
  const auto order = offer_cheap_orders(p, none_fits, m);
  CHECK_FALSE(none_fits.found());
  return measure_order(p, order).peak;
}

/// A backend that answers nothing: methods refuse too large problems before they call it.
struct silent_backend {
  std::string name() const { return "silent"; }
  milp::solution solve(const milp::model&, const milp::options&) const { return {}; }
};

}  // namespace

TEST_CASE("automatic finds a schedule of every family even if it must stop at once") {
  for (const auto& f : testing::families()) {
    INFO(f.name);
    const auto p = f.make(2000);
    CHECK(p.operations().size() >= 1500);
    CHECK(p.operations().size() <= 2500);
    const auto all = measure_store_all(p).peak, least = leanest_cheap(p);
    CHECK(least <= all);
    for (const auto budget : {least, least + (all - least) / 4, all - 1, all}) {
      if (budget < least) continue;
      const auto r = solve(p, budget, automatic<>(), {.seconds = 0});
      CHECK(r.found());
      CHECK(r.peak <= budget);
    }
    const auto below = solve(p, least - 1, automatic<>(), {.seconds = 0});
    if (below.status != status::infeasible) CHECK((below.found() ? below.peak : below.smallest_budget.value_or(all + 1)) <= all);
    const auto asked = solve(p, least, automatic<>(), {}, [](const progress&) { return control::stop; });
    CHECK(asked.found());
  }
}

TEST_CASE("copies and more tiers do not slow down the schedule that automatic finds if it must stop at once") {
  const auto slow = copy_rates{1, 1};  // a copy takes longer than most operations
  for (const auto& f : testing::families()) {
    const auto plain = f.make(2000);
    const auto all = measure_store_all(plain).peak, least = leanest_cheap(plain);
    const memory_system tiers{{{"device"}, {"host", all / 2}, {"disk"}}, {{1, 2, 1, 0, "write"}, {2, 1, 1, 0, "read"}}};
    auto members = plain.with_copies(slow).members();
    members.system = tiers;
    const problem with_disk(std::move(members));
    for (const auto budget : {least, least + (all - least) / 3}) {
      const auto without = solve(plain, budget, automatic<>(), {.seconds = 0});
      for (const auto& p : {plain.with_copies(slow), with_disk}) {
        INFO(f.name << ", " << p.tiers().size() << " tiers, " << budget << " bytes");
        const auto r = solve(p, budget, automatic<>(), {.seconds = 0});
        REQUIRE(r.found());
        CHECK(r.peak <= budget);
        CHECK(r.seconds <= without.seconds * (1 + 1e-9));
      }
    }
  }
}

TEST_CASE("with copies, automatic reports the first cheap order that fits as early as without") {
  const auto p = testing::tree(12'000);
  const auto budget = leanest_cheap(p) * 3 / 2;
  const auto first = [&](const problem& q) {
    double seconds = 0;
    solve(q, budget, automatic<>(), {.seconds = 1e9}, [&](const progress& now) {
      if (seconds == 0) seconds = now.best;
      return control::stop;
    });
    return seconds;
  };
  CHECK(first(p.with_copies(copy_rates{1, 1})) == Approx(first(p)));
}

TEST_CASE("automatic finds a schedule if only the order of least memory fits") {
  for (const auto& p : {testing::deep_chain(2000), testing::recurrence(2000)}) {
    const auto order = solve(p, measure_store_all(p).peak - 1, chen({.variant = chen::variant::last_node})).schedule;
    const auto budget = evaluate(p, order).peak;
    CHECK(budget < leanest_cheap(p));
    for (const auto& q : {p, p.with_copies(copy_rates{1, 1})})
      CHECK(solve(q, budget, automatic<>(), {.seconds = 20}, [](const progress&) { return control::stop; }).found());
  }
}

TEST_CASE("recursive checkpoints and separators need a small share of store-all in deep and narrow graphs") {
  for (const auto& [name, share] : {std::pair<const char*, double>{"deep chain", 0.03},
                                    {"recurrence", 0.04},
                                    {"grid", 0.25},
                                    {"tree", 0.1},
                                    {"long skips", 0.25},
                                    {"dense skips", 0.2},
                                    {"series-parallel", 0.1}})
    for (const auto& f : testing::families()) {
      if (f.name != name) continue;
      INFO(f.name);
      const auto p = f.make(2000);
      CHECK(static_cast<double>(leanest_cheap(p)) <= share * static_cast<double>(measure_store_all(p).peak));
    }
}

TEST_CASE("a chain of a hundred thousand operations is planned without a deep stack") {
  const auto p = testing::deep_chain(testing::shortened(100'000));
  const auto budget = measure_store_all(p).peak / 10;
  CHECK(solve(p, budget, automatic<>(), {.seconds = 0}).found());
  CHECK(solve(p, budget, chen({.variant = chen::variant::crossing, .division = chen::division::square_root}), {.seconds = 1e9})
            .found());
  CHECK_NOTHROW(solve(p, budget, min_cut(), {.seconds = 0}));
  CHECK_NOTHROW(solve(p, budget, hierarchical<>(), {.seconds = 0}));
  CHECK_NOTHROW(solve(p, budget, twremat(), {.seconds = 0}));
}

TEST_CASE("a method refuses a too large problem with its name, the number and the limit") {
  const auto p = testing::long_skips(30'000);
  const auto budget = measure_store_all(p).peak / 2;
  CHECK_THROWS_AS(solve(p, budget, checkmate<silent_backend>()), too_large);
  CHECK_THROWS_WITH(solve(p, budget, checkmate<silent_backend>()),
                    Catch::Contains("checkmate/silent") && Catch::Contains("operations") && Catch::Contains("at most"));
  CHECK_THROWS_WITH(solve(p, budget, checkmate_rounding<silent_backend>()), Catch::Contains("checkmate-rounding"));
  CHECK_THROWS_WITH(solve(p, budget, moments<silent_backend>(), {.seconds = 1}),
                    Catch::Contains("moments/silent") && Catch::Contains("20000"));
  CHECK(solve(p, budget, automatic<silent_backend>(), {.seconds = 0}).found());
}
