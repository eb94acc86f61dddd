// SPDX-License-Identifier: Apache-2.0
/// @file
/// Boost graphs as DAGs. Needs Boost.Graph; not part of the umbrella header.
#pragma once

#include <concepts>
#include <cstddef>
#include <vector>

#include <boost/graph/graph_traits.hpp>
#include <boost/graph/properties.hpp>
#include <boost/pending/property.hpp>

#include <remat/graph/dag.hpp>

namespace remat {

namespace detail {

/// Calls `vertices(g)` of Boost where a member of the same name hides it.
template <class G>
auto boost_vertices(const G& g) {
  return vertices(g);
}

/// True if `get(boost::vertex_index, g)` exists. If it does not, Boost turns a direct test into a hard error.
template <class G>
concept numbers_vertices = std::integral<typename boost::graph_traits<G>::vertex_descriptor> ||
    boost::lookup_one_property<typename boost::vertex_property_type<G>::type, boost::vertex_index_t>::found;

}  // namespace detail

/// A directed Boost graph that lists its vertices (VertexListGraph) and the out-edges of each vertex (IncidenceGraph, such as a
/// BidirectionalGraph), and that numbers its vertices (`boost::vertex_index`). Graphs with `boost::listS` vertices need a
/// property of that name. An edge runs from an operation to a reader of its result.
/// @code
/// using graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, op>;
/// static_assert(remat::boost_graph<graph> && remat::dag<graph>);
/// static_assert(!remat::boost_graph<boost::adjacency_list<boost::vecS, boost::vecS, boost::undirectedS>>);
/// @endcode
template <class G>
concept boost_graph = requires {
  requires std::derived_from<typename G::directed_category, boost::directed_tag>;
}
&&detail::numbers_vertices<G>&& requires(const G& g, const typename boost::graph_traits<G>::vertex_descriptor& v,
                                         const typename boost::graph_traits<G>::edge_descriptor& e) {
  vertices(g).first != vertices(g).second;
  out_edges(v, g).first != out_edges(v, g).second;
  { target(e, g) } -> std::convertible_to<typename boost::graph_traits<G>::vertex_descriptor>;
};

/// Makes every `boost_graph` a `dag`. Costs come from property maps, see `table`.
/// Complexity: O(V + E) for all vertices; `freeze` reads the out-edges of each vertex once.
/// @code
/// auto r = remat::solve(g, remat::table{remat::seconds_of(get(&op::seconds, g)), remat::bytes_of(get(&op::bytes, g))},
///                       1 << 30, remat::rotor{});
/// @endcode
template <boost_graph G>
struct dag_traits<G> {
  using vertex = typename boost::graph_traits<G>::vertex_descriptor;

  static std::vector<vertex> vertices(const G& g) {
    const auto [first, last] = detail::boost_vertices(g);
    return std::vector<vertex>(first, last);
  }
  static std::vector<vertex> outputs(const G& g, const vertex& v) {
    std::vector<vertex> readers;
    for (auto [e, end] = out_edges(v, g); e != end; ++e) readers.push_back(target(*e, g));
    return readers;
  }
  static std::size_t index(const G& g, const vertex& v) { return get(get(boost::vertex_index, g), v); }
};

}  // namespace remat
