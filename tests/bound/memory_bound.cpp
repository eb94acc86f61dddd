// SPDX-License-Identifier: Apache-2.0
// Bounds on the smallest budget, against exhaustive search.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>

#include <remat/bound/memory_bound.hpp>
#include <remat/bound/min_cut_bound.hpp>
#include <remat/core/evaluate.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

using namespace remat;
using namespace remat::testing;

TEST_CASE("last_runs_bound counts targets that are on the device when the others run for the last time") {
  // Two targets of 10 bytes, made from a value of 6 bytes and from a value of 2 bytes. The first target first, then 10 + 10 + 2
  // bytes.
  const problem p("p", {{"x", 1, true}, {"a", 6}, {"b", 2}, {"s", 10}, {"t", 10}},
                  {{"a", {0}, {1}, 1}, {"b", {0}, {2}, 1}, {"s", {1}, {3}, 1}, {"t", {2}, {4}, 1}}, {3, 4});
  CHECK(bound::last_runs_bound(p) == 23);
  CHECK(bound::min_cut_bound(p, 22).budget == 23);
  CHECK(exhaustive_optimum(p, 23));
  CHECK_FALSE(exhaustive_optimum(p, 22));
  std::mt19937_64 g(9);
  int tight = 0;
  for (int round = 0; round < 500; ++round) {
    const auto q = random_problem(g, {.operations = 5, .held = 100, .target = 60});
    const auto least = std::max(bound::last_runs_bound(q), bounds_without_search(q).budget);
    CHECK_FALSE(exhaustive_optimum(q, least - 1));
    tight += exhaustive_optimum(q, least).has_value();
  }
  CHECK(tight > 100);
}

TEST_CASE("an output that overwrites an input counts once in a working set") {
  const problem p("p", {{"x", 7, true}, {"w", 30}, {"g", 5}, {"w'", 30}},
                  {{.name = "w", .inputs = {0}, .outputs = {1}, .seconds = 1},
                   {.name = "g", .inputs = {1}, .outputs = {2}, .seconds = 1},
                   {.name = "update", .inputs = {1, 2}, .outputs = {3}, .seconds = 1, .overwrites = {{3, 1}}}},
                  {3});
  CHECK(bound::last_run_cut(p).working_set(2) == 7 + 30 + 5);
  schedule s;
  for (operation_id o = 0; o < 3; ++o) s.compute(o);
  CHECK(evaluate(p, s).peak == 7 + 30 + 5);
}

TEST_CASE("last_large_run_bound counts values on the device when the last large operation runs for the last time") {
  // The targets s and t (t by way of a) are made from the large value w. s and a run while w is there, in either order.
  const problem p("p", {{"x", 1, true}, {"w", 30}, {"s", 10}, {"a", 4}, {"t", 10}},
                  {{"w", {0}, {1}, 1}, {"s", {1}, {2}, 1}, {"a", {1}, {3}, 1}, {"t", {3}, {4}, 1}}, {2, 4});
  CHECK(bound::last_run_cut(p).working_set(1) == 41);
  CHECK(bound::last_large_run_bound(p) ==
        45);  // while the second of them runs, the result of the first is on the device: 1 + 30 + 10 + 4
  CHECK(exhaustive_optimum(p, 45));
  CHECK_FALSE(exhaustive_optimum(p, 44));
  CHECK(bound::last_large_run_bound(p, 50) == 50);
  CHECK(bound::last_large_run_bound(p, 7, {}, 0) == 7);
  CHECK(bound::last_large_run_bound(p, 7, [] { return true; }) == 7);
  std::mt19937_64 g(10);
  int tight = 0, higher = 0;
  for (int round = 0; round < 2000; ++round) {
    const auto q = random_problem(g, {.operations = static_cast<std::size_t>(uniform(g, 3, 6)),
                                      .once = round % 3 == 0 ? 25 : 0,
                                      .target = round % 2 == 0 ? 60 : 20});
    const auto least = bound::last_large_run_bound(q);
    INFO("round " << round << ", " << least << " bytes");
    REQUIRE_FALSE(exhaustive_optimum(q, least - 1));
    tight += exhaustive_optimum(q, least).has_value();
    higher += least > std::max(bound::last_runs_bound(q), bounds_without_search(q).budget);
  }
  CAPTURE(tight, higher);
  CHECK(tight > 1000);
  CHECK(higher > 50);
}

TEST_CASE("an operation is not the last of a set if its outputs are of no use then") {
  // b and c need 10 bytes of workspace each. The second of them runs beside the result of the first: t is made of both. A run
  // beside t would be of no use.
  const problem p("p", {{"x", 1, true}, {"a", 4}, {"b", 10}, {"c", 10}, {"d", 5}, {"t", 1}},
                  {{"a", {0}, {1}, 1}, {"b", {1}, {2}, 1, 10}, {"c", {1}, {3}, 1, 10}, {"d", {3}, {4}, 1}, {"t", {2, 4}, {5}, 1}},
                  {5});
  bound::last_run_cut cut(p);
  for (operation_id o : {1, 2}) cut.forbid(o);
  CHECK(cut.min_bytes(1) == 1 + 4 + 10 + 10 + 5);   // d is kept
  CHECK(cut.min_bytes(2) == 1 + 4 + 10 + 10 + 10);  // b is kept
  cut.forbid(4);
  CHECK_FALSE(cut.may_be_last(1));
  CHECK(bound::last_large_run_bound(p) == 30);
  CHECK(exhaustive_optimum(p, 30));
  CHECK_FALSE(exhaustive_optimum(p, 29));
}

TEST_CASE("memory bounds of large graphs stop before and while they build their network") {
  const auto p = training_chain(std::vector<layer>(40'000));
  int polls = 0;
  CHECK(bound::last_large_run_bound(p, 7, [&] { return ++polls == 1; }) == 7);
  CHECK(polls == 1);
  CHECK(bound::last_large_run_bound(p, 7, [&] { return ++polls == 3; }) == 7);  // stops while the network is built
  CHECK(polls == 3);
  CHECK_THROWS_AS(bound::last_run_cut(p, [] { return true; }), bound::interrupted);
}
