// SPDX-License-Identifier: Apache-2.0
// Separators of tree decompositions.
#include <catch2/catch.hpp>

#include <vector>

#include <remat/structure/separator_tree.hpp>
#include <remat/testing/generators.hpp>

#include "../pebbles.hpp"

using namespace remat;
using namespace remat::testing;

namespace {

/// Checks that every needed operation is in one separator, that neighbours lie in one part or in a part and its ancestor, and
/// that children have at most half of the operations.
void check_tree(const problem& p, const structure::separator_tree& tree) {
  const auto needed = needed_operations(p);
  const auto& parts = tree.parts();
  std::vector<int> seen(p.operations().size(), 0);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].separator.size() <= tree.width() + 1);
    for (auto o : parts[i].separator) {
      ++seen[o];
      CHECK(tree.part_of(o) == i);
    }
    std::size_t below = parts[i].separator.size();
    for (auto c : parts[i].children) {
      CHECK(2 * parts[c].operations <= parts[i].operations);
      below += parts[c].operations;
    }
    CHECK(below == parts[i].operations);
  }
  for (auto o : needed) {
    CHECK(seen[o] == 1);
    for (auto v : p.operations()[o].inputs)
      if (!p.is_source(v))
        CHECK((tree.is_within(o, tree.part_of(p.producer(v))) || tree.is_within(p.producer(v), tree.part_of(o))));
  }
  CHECK(parts.front().operations == needed.size());
}

}  // namespace

TEST_CASE("separators keep parts apart and halve them") {
  std::mt19937_64 g(51);
  for (int round = 0; round < 200; ++round) {
    const auto p = round % 2 == 0 ? random_problem(g, {.operations = 30}) : random_training_chain(g, 8);
    check_tree(p, structure::separator_tree(p, needed_operations(p)));
  }
  check_tree(transformer_training_graph(10),
             structure::separator_tree(transformer_training_graph(10), needed_operations(transformer_training_graph(10))));
  CHECK(structure::separator_tree(problem{}, {}).empty());
  const auto p = pyramid(5);
  CHECK(structure::separator_tree(p, needed_operations(p), [] { return true; }).empty());
}

TEST_CASE("the width of chains, trees, ladders and complete graphs") {
  const auto width = [](const problem& p) { return structure::separator_tree(p, needed_operations(p)).width(); };
  std::vector<std::vector<value_id>> chain(50), complete(9);
  for (index_t i = 1; i < 50; ++i) chain[i] = {i - 1};
  for (index_t i = 1; i < 9; ++i)
    for (index_t k = 0; k < i; ++k) complete[i].push_back(k);
  CHECK(width(pebbles(chain)) == 1);
  CHECK(width(complete_binary_tree(7)) == 1);
  CHECK(width(unit_training_chain(60)) == 2);
  CHECK(width(pebbles(complete)) == 8);
}
