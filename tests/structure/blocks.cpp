// SPDX-License-Identifier: Apache-2.0
// Blocks of training graphs.
#include <catch2/catch.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <remat/chain/block_problem.hpp>
#include <remat/structure/blocks.hpp>
#include <remat/structure/canonical.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"

using namespace remat;
using namespace remat::testing;

namespace {

/// Every needed operation is in one block; the forward of block i reads nothing of earlier blocks but its inputs, pinned and held
/// values; its backward reads forward values of its own block, its inputs, pinned and held ones, and its gradients.
void check_blocks(const problem& p, const structure::block_chain& c) {
  std::vector<int> seen(p.operations().size(), 0), block_of(p.operations().size(), -1);
  std::vector<bool> pinned(p.values().size(), false), backward(p.operations().size(), false);
  for (auto v : c.pinned) pinned[v] = true;
  for (std::size_t i = 0; i < c.blocks.size(); ++i) {
    for (auto o : c.blocks[i].forward) ++seen[o], block_of[o] = static_cast<int>(i);
    for (auto o : c.blocks[i].backward) ++seen[o], block_of[o] = static_cast<int>(i), backward[o] = true;
  }
  for (auto o : needed_operations(p)) REQUIRE(seen[o] == 1);
  for (std::size_t i = 0; i < c.blocks.size(); ++i) {
    const auto has = [](const auto& list, auto v) { return std::find(list.begin(), list.end(), v) != list.end(); };
    const auto outside = [&](value_id v) {
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
    const auto c = structure::find_blocks(p, {.least = 1});
    check_blocks(p, c);
    CHECK(c.blocks.size() + 3 >= n);
    const auto joined = structure::find_blocks(p, {.most = 4});
    check_blocks(p, joined);
    CHECK(joined.blocks.size() <= 4);
  }
}

TEST_CASE("blocks of a transformer repeat, with the mask pinned") {
  const auto p = transformer_training_graph(6);
  const auto c = structure::find_blocks(p);
  check_blocks(p, c);
  CHECK(c.blocks.size() >= 11);
  const bool mask = std::any_of(c.pinned.begin(), c.pinned.end(), [&](value_id v) { return p.values()[v].name == "mask:0"; });
  CHECK(mask);
  int equal = 0;
  const auto form = [&](std::size_t i) { return structure::canonical(chain::block_problem(p, c, i).bare()); };
  for (std::size_t i = 3; i < 8; ++i) equal += form(i) == form(i + 2);
  CHECK(equal >= 4);
  CHECK_FALSE(form(3) == form(4));
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
    const auto p = instance(name);
    const auto c = structure::find_blocks(p);
    check_blocks(p, c);
    CHECK(c.blocks.size() >= least);
  }
}

TEST_CASE("a graph without a chain is one block, and options out of range are refused") {
  std::vector<value> values = {{"x", 1, true}};
  std::vector<operation> ops;
  for (index_t i = 1; i <= 9; ++i) {
    values.push_back({"v", 100, false});
    std::vector<value_id> all(i);
    for (index_t k = 0; k < i; ++k) all[k] = k;
    ops.push_back({"o", all, {i}, 1});
  }
  const problem p("dense", values, ops, {9});
  const auto c = structure::find_blocks(p);
  check_blocks(p, c);
  CHECK(c.blocks.size() == 1);
  CHECK(structure::find_blocks(problem{}).blocks.empty());
  CHECK_THROWS_WITH(structure::find_blocks(p, {.backward_start = 9}), Catch::Contains("backward_start"));
  CHECK_THROWS_WITH(structure::find_blocks(p, {.interface = 0}), Catch::Contains("interface"));
  CHECK_THROWS_WITH(structure::find_blocks(p, {.most = 0}), Catch::Contains("most"));
}

TEST_CASE("long training chains fall into their layers, all values being small") {
  std::mt19937_64 g(24);
  const auto p = random_training_chain(g, 2500);
  const auto c = structure::find_blocks(p, {.most = 10'000, .least = 1});
  CHECK(c.blocks.size() > 2000);
}
