// SPDX-License-Identifier: Apache-2.0
// Boost graphs of all storage types, with property maps as costs.
#include <catch2/catch.hpp>

#include <string>
#include <utility>
#include <vector>

#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/adjacency_matrix.hpp>
#include <boost/graph/compressed_sparse_row_graph.hpp>
#include <boost/graph/reverse_graph.hpp>

#include <remat/graph/boost.hpp>
#include <remat/graph/freeze.hpp>
#include <remat/graph/table.hpp>

namespace {

struct op {
  std::string name;
  double seconds;
  int bytes;
};

using directed = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, op>;
using bidirectional = boost::adjacency_list<boost::setS, boost::vecS, boost::bidirectionalS, op>;
using listed =
    boost::adjacency_list<boost::vecS, boost::listS, boost::bidirectionalS, boost::property<boost::vertex_index_t, int>>;
using matrix = boost::adjacency_matrix<boost::directedS, op>;
using sparse = boost::compressed_sparse_row_graph<>;

static_assert(remat::dag<directed> && remat::dag<bidirectional> && remat::dag<listed> && remat::dag<matrix> &&
              remat::dag<sparse>);
static_assert(remat::dag<boost::reverse_graph<bidirectional>>);
static_assert(!remat::dag<boost::adjacency_list<boost::vecS, boost::vecS, boost::undirectedS>>);      // no direction
static_assert(!remat::dag<boost::adjacency_list<boost::vecS, boost::listS, boost::bidirectionalS>>);  // no vertex_index

/// a -> b, a -> c; d reads b and c.
const std::vector<std::pair<int, int>> edges = {{0, 1}, {0, 2}, {1, 3}, {2, 3}};

template <class G>
G diamond() {
  G g(4);
  const char* names[] = {"a", "b", "c", "d"};
  for (std::size_t v = 0; v < 4; ++v) g[v] = {names[v], 1.0 + static_cast<double>(v), 10 * static_cast<int>(v + 1)};
  for (auto [u, v] : edges) add_edge(static_cast<std::size_t>(u), static_cast<std::size_t>(v), g);
  return g;
}

void check_diamond(const remat::problem& p) {
  REQUIRE(p.operations().size() == 4);
  CHECK(p.operations()[0].inputs.empty());
  CHECK(p.operations()[1].inputs == std::vector<remat::value_id>{0});
  CHECK(p.operations()[2].inputs == std::vector<remat::value_id>{0});
  CHECK(p.operations()[3].inputs == std::vector<remat::value_id>{1, 2});
  CHECK(p.targets() == std::vector<remat::value_id>{3});
}

}  // namespace

TEMPLATE_TEST_CASE("freeze reads costs from property maps inside a Boost graph", "", directed, bidirectional, matrix) {
  const auto g = diamond<TestType>();
  const remat::table costs{remat::seconds_of(get(&op::seconds, g)), remat::bytes_of(get(&op::bytes, g)),
                           remat::name_of(get(&op::name, g))};
  static_assert(remat::cost_model<decltype(costs), TestType>);
  const auto f = remat::freeze(g, costs);
  check_diamond(f);
  CHECK(f.problem.operations()[2].seconds == 3);
  CHECK(f.problem.values()[3].bytes == 40);
  CHECK(f.problem.values()[1].name == "b");
}

TEST_CASE("freeze reads property maps outside a Boost graph, with vertices that are not numbers") {
  listed g;
  std::vector<listed::vertex_descriptor> v;
  for (int i = 0; i < 4; ++i) v.push_back(add_vertex(boost::property<boost::vertex_index_t, int>(i), g));
  for (auto [a, b] : edges) add_edge(v[static_cast<std::size_t>(a)], v[static_cast<std::size_t>(b)], g);
  const std::vector<double> seconds = {1, 2, 3, 4};
  const auto index = get(boost::vertex_index, g);
  const remat::table costs{remat::seconds_of(boost::make_iterator_property_map(seconds.begin(), index)),
                           remat::bytes_of([](const auto&) { return 1; })};
  const auto f = remat::freeze(g, costs);
  check_diamond(f);
  CHECK(f.problem.operations()[3].seconds == 4);
  CHECK(f.operations == v);
}

TEST_CASE("freeze takes compressed and reversed Boost graphs") {
  const sparse g(boost::edges_are_sorted, edges.begin(), edges.end(), 4);
  const auto one = [](auto) { return 1; };
  const remat::table costs{remat::seconds_of(one), remat::bytes_of(one)};
  check_diamond(remat::freeze(g, costs));
  const auto b = diamond<bidirectional>();
  CHECK(remat::freeze(boost::make_reverse_graph(b), costs).operations == std::vector<std::size_t>{3, 1, 2, 0});
}

TEST_CASE("freeze names the cycle of a Boost graph") {
  auto g = diamond<directed>();
  add_edge(3, 0, g);
  const remat::table costs{remat::seconds_of(get(&op::seconds, g)), remat::bytes_of(get(&op::bytes, g)),
                           remat::name_of(get(&op::name, g))};
  CHECK_THROWS_WITH(remat::freeze(g, costs), "the graph has a cycle: a -> b -> d -> a");
}
