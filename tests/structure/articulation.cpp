// SPDX-License-Identifier: Apache-2.0
// Articulation points.
#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <vector>

#include <remat/structure/articulation.hpp>
#include <remat/testing/generators.hpp>

using namespace remat;
using namespace remat::testing;

namespace {

/// The number of connected pieces of the undirected graph of `ops` and two stubs, without the operation `gone`.
std::size_t pieces(const problem& p, const std::vector<operation_id>& ops, index_t gone) {
  std::vector<std::size_t> piece(p.operations().size() + 2);
  const auto source = p.operations().size(), sink = source + 1;
  for (std::size_t i = 0; i < piece.size(); ++i) piece[i] = i;
  const auto join = [&](std::size_t a, std::size_t b) {
    const auto from = piece[a], to = piece[b];
    if (a != gone && b != gone) std::replace(piece.begin(), piece.end(), from, to);
  };
  join(source, ops.front());
  join(ops.back(), sink);
  for (auto o : ops)
    for (auto v : p.operations()[o].inputs)
      if (!p.is_source(v) && std::find(ops.begin(), ops.end(), p.producer(v)) != ops.end()) join(p.producer(v), o);
  std::vector<std::size_t> distinct = {piece[source], piece[sink]};
  for (auto o : ops)
    if (o != gone) distinct.push_back(piece[o]);
  std::sort(distinct.begin(), distinct.end());
  return static_cast<std::size_t>(std::unique(distinct.begin(), distinct.end()) - distinct.begin());
}

}  // namespace

TEST_CASE("articulation points are the operations whose removal leaves more pieces") {
  std::mt19937_64 g(41);
  int some = 0, none_found = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto p = random_problem(g, {.operations = 9, .outputs = 1, .inputs = 2, .density = 40});
    std::vector<operation_id> ops;
    for (operation_id o = 0; o < 9; ++o)
      if (chance(g, 80)) ops.push_back(o);
    if (ops.empty()) continue;
    const auto found = structure::articulation_points(p, ops);
    for (auto o : ops) {
      INFO("round " << round << ", operation " << o);
      CHECK(std::binary_search(found.begin(), found.end(), o) == (pieces(p, ops, o) > pieces(p, ops, none)));
    }
    ++(found.empty() ? none_found : some);
  }
  CHECK(some > 500);
  CHECK(none_found > 10);
  CHECK(structure::articulation_points(problem{}, {}).empty());
  const auto chain = unit_training_chain(20'000);  // deep
  std::vector<operation_id> forward(20'000);
  for (operation_id o = 0; o < forward.size(); ++o) forward[o] = o;
  CHECK(structure::articulation_points(chain, forward) == forward);
}
