// SPDX-License-Identifier: Apache-2.0
// Partitions that cut where few bytes cross.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/structure/partition.hpp>
#include <remat/testing/generators.hpp>

#include "../instances.hpp"
#include "../networks.hpp"

using namespace remat;
using namespace remat::testing;

namespace {

/// Checks the blocks of a chain: no operation is in two blocks, a forward reads no values of later forwards, and only backwards
/// of the same or earlier blocks read what a backward computes.
void check_blocks(const problem& p, const structure::partition& blocks) {
  std::vector<std::size_t> block(p.operations().size(), none);
  std::vector<bool> backward(block.size(), false);
  for (std::size_t i = 0; i < blocks.size(); ++i)
    for (const auto* half : {&blocks[i].forward, &blocks[i].backward})
      for (auto o : *half) {
        REQUIRE(block[o] == none);
        block[o] = i;
        backward[o] = half == &blocks[i].backward;
      }
  for (auto o : needed_operations(p))
    for (auto v : p.operations()[o].inputs) {
      if (p.is_source(v) || block[o] == none || block[p.producer(v)] == none) continue;
      const auto from = block[p.producer(v)];
      if (backward[p.producer(v)])
        REQUIRE((backward[o] && from >= block[o]));
      else if (!backward[o])
        REQUIRE(from <= block[o]);
    }
}

}  // namespace

TEST_CASE("find_partition cuts networks into several parts, and names bad options") {
  const auto chain = structure::find_partition(unit_training_chain(60), {.size = 10});
  CHECK(chain.size() >= 7);
  const auto u = u_net(4, 6);
  const auto parts = structure::find_partition(u, {.size = 16});
  CHECK(parts.size() >= 5);
  const auto dense = dense_net(4, 6);
  CHECK(structure::find_partition(dense, {.size = 24}).size() >= 4);
  CHECK(structure::find_partition(branches(4, 3, 4), {.size = 24}).size() >= 4);
  CHECK(structure::find_partition(problem{}).empty());
  const auto t = transformer_training_graph(12);
  CHECK(structure::find_partition(t, {.backward_start = 150}).size() >= 6);
  CHECK(structure::find_partition(t, {.most = 3}).size() <= 3);
  CHECK_THROWS_WITH(structure::find_partition(t, {.backward_start = 5000}), Catch::Contains("backward_start"));
  CHECK_THROWS_WITH(structure::find_partition(t, {.size = 0}), Catch::Contains("size"));
  CHECK_THROWS_WITH(structure::find_partition(t, {.most = 0}), Catch::Contains("most"));
}

TEST_CASE("find_partition cuts training chains into their layers") {
  std::mt19937_64 g(21);
  for (std::size_t n : {3u, 8u, 30u}) {
    const auto p = random_training_chain(g, n);
    const auto blocks = structure::find_partition(p, {.size = 1, .interface = 1});
    check_blocks(p, blocks);
    CHECK(blocks.size() + 3 >= n);
    const auto joined = structure::find_partition(p, {.size = 1, .most = 4, .interface = 1});
    check_blocks(p, joined);
    CHECK(joined.size() <= 4);
  }
  const auto p = random_training_chain(g, 2500);  // all values are small
  CHECK(structure::find_partition(p, {.size = 1, .most = 10'000, .interface = 1}).size() > 2000);
}

TEST_CASE("find_partition cuts networks into blocks") {
  const auto t = transformer_training_graph(6);
  const auto blocks = structure::find_partition(t, {.size = 8, .interface = 1});
  check_blocks(t, blocks);
  CHECK(blocks.size() >= 11);
  for (const auto& [name, least] : {std::pair{"gpt2-layers-12", 24u},
                                    {"resnet18", 8u},
                                    {"resnet50", 16u},
                                    {"vit-b-16-batch-4", 20u},
                                    {"llama-layers-24-d-1024", 24u},
                                    {"mobilenet-v3-small", 16u},
                                    {"unet-depth-4", 2u}}) {
    INFO(name);
    const auto p = instance(name);
    const auto c = structure::find_partition(p, {.size = 8, .most = 48, .interface = 1});
    check_blocks(p, c);
    CHECK(c.size() >= least);
  }
}

TEST_CASE("find_partition returns one block for a graph without a chain") {
  CHECK(structure::find_partition(uncuttable(9), {.size = 8, .interface = 1}).size() == 1);
  CHECK(structure::find_partition(problem{}, {.interface = 1}).empty());
}

TEST_CASE("without_once removes once-only operations from parts") {
  std::mt19937_64 g(22);
  const auto p = random_problem(g, {.operations = 30, .once = 30});
  std::size_t dropped = 0;
  const auto parts = structure::find_partition(p, {.size = 4});
  const auto without = structure::without_once(p, parts);
  for (const auto& x : parts) dropped += x.size();
  for (const auto& x : without) {
    CHECK(x.size() > 0);
    for (const auto* half : {&x.forward, &x.backward}) {
      dropped -= half->size();
      for (auto o : *half) CHECK_FALSE(p.operations()[o].once);
    }
  }
  CHECK(dropped > 0);
}
