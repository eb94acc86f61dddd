// SPDX-License-Identifier: Apache-2.0
// Chains of blocks, and the solvers that live on them: store_all, chen, rotor, rockmate.
#include <catch2/catch.hpp>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/solve.hpp>
#include <remat/io/json.hpp>
#include <remat/solver/chen.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/rockmate.hpp>
#include <remat/solver/rotor.hpp>
#include <remat/solver/store_all.hpp>
#include <remat/testing/check_solver.hpp>
#include <remat/testing/generators.hpp>
#include <remat/testing/oracle.hpp>

using namespace remat;
using namespace remat::testing;

static_assert(solver<store_all> && solver<chen> && solver<rotor> && solver<rockmate<>> && solver<rockmate<chen>>);

namespace {

problem captured(const std::string& name) {
  return read_problem(std::string(REMAT_SOURCE_DIR) + "/bench/instances/" + name + ".json");
}
bytes_t part_of_peak(const problem& p, double f) {
  return p.held_bytes() + static_cast<bytes_t>(f * static_cast<double>(evaluate(p, store_all_schedule(p)).peak - p.held_bytes()));
}

/// Every needed operation is in one block; the forward of block i reads nothing of earlier blocks but its inputs, pinned and held
/// values; its backward reads forward values of its own block, its inputs, pinned and held ones, and its gradients.
void check_blocks(const problem& p, const block_chain& c) {
  std::vector<int> seen(p.operations().size(), 0), block_of(p.operations().size(), -1);
  std::vector<bool> pinned(p.values().size(), false), backward(p.operations().size(), false);
  for (auto v : c.pinned) pinned[v] = true;
  for (std::size_t i = 0; i < c.blocks.size(); ++i) {
    for (auto o : c.blocks[i].forward) ++seen[o], block_of[o] = static_cast<int>(i);
    for (auto o : c.blocks[i].backward) ++seen[o], block_of[o] = static_cast<int>(i), backward[o] = true;
  }
  for (auto o : needed_operations(p)) REQUIRE(seen[o] == 1);
  for (std::size_t i = 0; i < c.blocks.size(); ++i) {
    const auto has = [](const std::vector<index_t>& list, index_t v) {
      return std::find(list.begin(), list.end(), v) != list.end();
    };
    const auto outside = [&](index_t v) {
      return !p.is_source(v) && !pinned[v] && block_of[p.producer(v)] != static_cast<int>(i) && !has(c.blocks[i].inputs, v);
    };
    for (auto o : c.blocks[i].forward)
      for (auto v : p.operations()[o].inputs) REQUIRE_FALSE(outside(v));
    for (auto o : c.blocks[i].backward)
      for (auto v : p.operations()[o].inputs)
        if (outside(v)) {
          const bool of_next = i + 1 < c.blocks.size() && has(c.blocks[i + 1].inputs, v);
          REQUIRE((backward[p.producer(v)] ? has(c.blocks[i].gradients, v) : of_next));
        }
  }
}

}  // namespace

TEST_CASE("training chains fall into their layers") {
  std::mt19937_64 g(21);
  for (std::size_t n : {3u, 8u, 30u}) {
    const auto p = random_training_chain(g, n);
    const auto c = find_blocks(p, {.least = 1});
    check_blocks(p, c);
    CHECK(c.blocks.size() + 3 >= n);
    const auto joined = find_blocks(p, {.most = 4});
    check_blocks(p, joined);
    CHECK(joined.blocks.size() <= 4);
  }
}

TEST_CASE("blocks of a transformer repeat, with the mask pinned") {
  const auto p = transformer_training_graph(6);
  const auto c = find_blocks(p);
  check_blocks(p, c);
  CHECK(c.blocks.size() >= 11);
  const bool mask = std::any_of(c.pinned.begin(), c.pinned.end(), [&](index_t v) { return p.values()[v].name == "mask:0"; });
  CHECK(mask);
  int equal = 0;
  for (std::size_t i = 3; i < 8; ++i) equal += block_problem(p, c, i) == block_problem(p, c, i + 2);
  CHECK(equal >= 4);
  CHECK_FALSE(block_problem(p, c, 3) == block_problem(p, c, 4));
}

TEST_CASE("blocks of captured networks") {
  for (const auto& [name, least] : {std::pair{"gpt2-layers-12", 24u},
                                    {"resnet18", 8u},
                                    {"resnet50", 16u},
                                    {"vit-b-16-batch-4", 20u},
                                    {"llama-layers-24-d-1024", 40u},
                                    {"mobilenet-v3-small", 16u},
                                    {"unet-depth-4", 2u}}) {
    INFO(name);
    const auto p = captured(name);
    const auto c = find_blocks(p);
    check_blocks(p, c);
    CHECK(c.blocks.size() >= least);
  }
}

TEST_CASE("methods for chains say that there is none") {
  // A training chain all of whose operations yield two values: no cut has but one value crossing it.
  std::vector<value> values = {{"x", 1, true}};
  std::vector<operation> ops;
  for (index_t i = 0; i < 8; ++i) {
    for (int k = 0; k < 2; ++k) values.push_back({"v", 10, false});
    std::vector<index_t> reads = {0};
    if (i > 0) reads = {2 * i - 1, 2 * i};
    if (i > 4) reads.insert(reads.end(), {2 * (8 - i) - 1, 2 * (8 - i)});
    ops.push_back({"o", reads, {2 * i + 1, 2 * i + 2}, 1});
  }
  const problem p("twins", values, ops, {15});
  const auto all = evaluate(p, store_all_schedule(p)).peak;
  for (const auto& r : {solve(p, all - 1, rotor{}), solve(p, all - 1, revolve{})}) {
    CHECK(r.status == status::not_applicable);
    CHECK(r.reason == no_chain);
  }
  CHECK(solve(p, all - 1, min_cut{}).found());
  for (const auto& r : {solve(p, all, rotor{}), solve(p, all, revolve{})}) {  // all fits
    CHECK(r.status == status::optimal);
    CHECK(r.reason.empty());
  }
}

TEST_CASE("a graph without a chain is one block, and options out of range are refused") {
  std::vector<value> values = {{"x", 1, true}};
  std::vector<operation> ops;
  for (index_t i = 1; i <= 9; ++i) {
    values.push_back({"v", 100, false});
    std::vector<index_t> all(i);
    for (index_t k = 0; k < i; ++k) all[k] = k;
    ops.push_back({"o", all, {i}, 1});
  }
  const problem p("dense", values, ops, {9});
  const auto c = find_blocks(p);
  check_blocks(p, c);
  CHECK(c.blocks.size() == 1);
  CHECK_FALSE(solve(p, 900, rotor{}).found());
  const auto layers = unit_training_chain(8);
  const auto unfit = solve(layers, 6, rotor({.blocks = {.most = 1}}));
  CHECK(unfit.status == status::not_applicable);
  CHECK(std::isinf(unfit.scope_bound));
  CHECK(solve(layers, 6, rotor{}).found());
  CHECK_THROWS_WITH(rotor({.slots = 0}), Catch::Contains("slots"));
  CHECK_THROWS_WITH(rotor({.table_links = 5000}), Catch::Contains("table_links"));
  CHECK_THROWS_WITH(rotor({.labels = 0}), Catch::Contains("labels"));
  CHECK_THROWS_WITH(rotor({.blocks = {.interface = 0}}), Catch::Contains("interface"));
  CHECK_THROWS_WITH(rotor({.blocks = {.most = 0}}), Catch::Contains("most"));
  CHECK(find_blocks(problem{}).blocks.empty());
  CHECK_THROWS_WITH(find_blocks(p, {.turn = 9}), Catch::Contains("turn"));
  CHECK_THROWS_WITH(find_blocks(p, {.interface = 0}), Catch::Contains("interface"));
  CHECK_THROWS_WITH(find_blocks(p, {.most = 0}), Catch::Contains("most"));
  CHECK_THROWS_AS(solve(p, 901, chen({.turn = 9})), bad_option);
  CHECK_THROWS_AS(chen({.tries = 0}), bad_option);
  CHECK_THROWS_AS(rockmate<>(min_cut{}, {.saved = 0}), bad_option);
  CHECK_THROWS_AS(rockmate<>(min_cut{}, {.peaks = 0}), bad_option);
}

TEST_CASE("all solvers against the optimum of small problems") {
  std::mt19937_64 g(22);
  int compared = 0, equal = 0, rotor_found = 0, chen_found = 0, faster_with_less = 0;
  for (int round = 0; round < 90; ++round) {
    const auto p = round % 3 == 0   ? random_training_chain(g, 3)
                   : round % 3 == 1 ? random_problem(g, {.operations = 7, .once = 20})
                                    : unit_training_chain(static_cast<std::size_t>(2 + round % 5));
    const auto all = evaluate(p, store_all_schedule(p));
    double before = 0;
    for (auto budget = all.peak; budget >= all.peak / 2; budget -= 2) {
      const auto best = exhaustive_optimum(p, budget);
      if (!best) break;
      const auto stored = solve(p, budget, store_all{}), segments = solve(p, budget, chen{}), chained = solve(p, budget, rotor{}),
                 blocks = solve(p, budget, rockmate<>{}, {.gap = 0});
      CHECK(stored.found() == (budget >= measure_order(p, needed_operations(p)).peak));
      for (const auto* r : {&stored, &segments, &chained, &blocks}) {
        CHECK(r->status != status::infeasible);
        if (r->found()) REQUIRE(r->seconds >= *best - 1e-9);
      }
      chen_found += segments.found() && segments.recomputed > 0;
      rotor_found += chained.found() && chained.recomputed > 0;
      ++compared;
      if (!blocks.found()) continue;
      equal += blocks.seconds < *best + 1e-9;
      faster_with_less += blocks.seconds < before - 1e-9;
      before = std::max(before, blocks.seconds);
    }
  }
  CHECK(compared > 200);
  CHECK(equal > compared * 9 / 10);
  CHECK(faster_with_less <= compared / 200);  // a heuristic: no more than a rare exception
  CHECK(rotor_found > 20);
  CHECK(chen_found > 20);
}

TEST_CASE("rotor on long unit chains is near the binomial optimum") {
  // Its links are charged a little differently from the unit chain's nodes, so it may take one byte more.
  for (const auto& [n, budget, optimum] : {std::tuple{12u, 5, 37.0}, {16u, 5, 53.0}, {20u, 6, 63.0}, {32u, 6, 111.0}}) {
    const auto p = unit_training_chain(n);
    const auto r = solve(p, budget + 1, rotor{});
    INFO("n " << n << ", budget " << budget);
    REQUIRE(r.found());
    CHECK(r.seconds <= 1.2 * optimum);
    const auto both = solve(p, budget + 1, rockmate<>{});
    REQUIRE(both.found());
    CHECK(both.seconds <= r.seconds);
  }
}

TEST_CASE("rotor conforms, and is proven among the schedules of its chain") {
  for (const auto& failure : check_solver(rotor{}, {.rounds = 150})) FAIL_CHECK(failure);
  std::mt19937_64 g(23);
  for (std::size_t n : {1u, 2u, 5u, 20u, 60u}) {
    const auto p = random_training_chain(g, n);
    const auto all = evaluate(p, store_all_schedule(p)).peak;
    std::vector<bytes_t> budgets;
    for (const int percent : {100, 80, 60, 50}) budgets.push_back(all * percent / 100);
    monitor m;
    const auto answers = rotor{}.sweep(p, budgets, m);
    REQUIRE(answers.size() == budgets.size());
    for (std::size_t k = 0; k < budgets.size(); ++k) {
      const auto one = solve(p, budgets[k], rotor{});
      CHECK(answers[k].budget == budgets[k]);
      CHECK(answers[k].found() == one.found());
      if (!one.found()) continue;
      CHECK(answers[k].peak <= budgets[k]);
      CHECK(answers[k].seconds <= 1.02 * one.seconds);
      CHECK(one.scope_gap() <= 1e-9);
    }
  }
  monitor m;
  CHECK(rotor{}.sweep(random_training_chain(g, 3), {}, m).empty());
}

TEST_CASE("long training chains fall into their layers, all values being small") {
  std::mt19937_64 g(24);
  const auto p = random_training_chain(g, 2500);
  const auto c = find_blocks(p, {.most = 10'000, .least = 1});
  CHECK(c.blocks.size() > 2000);
}

TEST_CASE("rockmate is no slower than its parts, and no slower with more memory") {
  for (const auto* name : {"gpt2-layers-2-seq-256", "resnet18", "unet-depth-4"}) {
    const auto p = captured(name);
    const auto all = evaluate(p, store_all_schedule(p));
    INFO(name);
    CHECK(solve(p, all.peak, rockmate<>{}).seconds == Approx(bounds_without_search(p).seconds));
    double before = 0;
    for (const double f : {.8, .5}) {
      const auto budget = part_of_peak(p, f);
      const auto r = solve(p, budget, rockmate<>{}), cut = solve(p, budget, min_cut{});
      REQUIRE(r.found());
      CHECK(r.seconds <= cut.seconds * (1 + 1e-9));
      CHECK(r.bound > 0);
      CHECK(r.bound <= r.seconds);
      CHECK(r.seconds >= before);
      before = r.seconds;
    }
  }
}

TEST_CASE("the blocks of rockmate may be solved by another solver, and a search may be stopped") {
  const auto p = transformer_training_graph(4);
  const auto budget = part_of_peak(p, .5);
  const auto r = solve(p, budget, rockmate(chen{}));
  REQUIRE(r.found());
  CHECK(r.solver == "rockmate/chen");
  CHECK(r.seconds < 1.3 * p.total_seconds());
  int reports = 0;
  const auto stopped = solve(p, budget, rockmate(chen{}), {}, [&](const progress&) {
    ++reports;
    return control::stop;
  });
  CHECK(reports == 1);
  CHECK(stopped.status != status::infeasible);
}
