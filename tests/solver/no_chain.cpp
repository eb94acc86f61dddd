// SPDX-License-Identifier: Apache-2.0
// Methods for chains on graphs without a chain.
#include <catch2/catch.hpp>

#include <vector>

#include <remat/core/solve.hpp>
#include <remat/solver/min_cut.hpp>
#include <remat/solver/pofo.hpp>
#include <remat/solver/revolve.hpp>
#include <remat/solver/rotor.hpp>

using namespace remat;

TEST_CASE("methods for chains report that a graph has no chain") {
  // A training chain whose operations have two outputs each: more than one value crosses every cut.
  std::vector<value> values = {{"x", 1, true}};
  std::vector<operation> ops;
  for (index_t i = 0; i < 8; ++i) {
    for (int k = 0; k < 2; ++k) values.push_back({"v", 10, false});
    std::vector<value_id> reads = {0};
    if (i > 0) reads = {2 * i - 1, 2 * i};
    if (i > 4) reads.insert(reads.end(), {2 * (8 - i) - 1, 2 * (8 - i)});
    ops.push_back({"o", reads, {2 * i + 1, 2 * i + 2}, 1});
  }
  const problem p("twins", values, ops, {15});
  const auto all = evaluate(p, store_all_schedule(p)).peak;
  const auto copying = p.with_copies(copy_rates{1, 1, 0});
  for (const auto& r : {solve(p, all - 1, rotor{}), solve(p, all - 1, revolve{}), solve(copying, all - 1, pofo{})}) {
    CHECK(r.status == status::not_applicable);
    CHECK(r.reason == structure::no_chain);
  }
  CHECK(solve(p, all - 1, min_cut{}).found());
  for (const auto& r : {solve(p, all, rotor{}), solve(p, all, revolve{}), solve(p, all, pofo{})}) {  // store-all fits
    CHECK(r.status == status::optimal);
    CHECK(r.reason.empty());
  }
}
