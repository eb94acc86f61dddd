// SPDX-License-Identifier: Apache-2.0
/// @file
/// A flow network whose minimum cut is asked for again and again with other capacities. Needs Boost.Graph.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 misreads Boost's edge iterator
#endif
#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/boykov_kolmogorov_max_flow.hpp>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace remat::detail {

/// Vertices 0 (source), 1 (sink) and those added; edges with capacities that may change between cuts.
class cut_network {
  using traits = boost::adjacency_list_traits<boost::vecS, boost::vecS, boost::directedS>;

 public:
  using edge = traits::edge_descriptor;
  using vertex = std::size_t;
  static constexpr vertex source = 0, sink = 1;
  static constexpr std::int64_t infinite = std::int64_t{1} << 58;

  cut_network() : graph_(2) {}
  cut_network(const cut_network&) = delete;  // descriptors of edges point into the graph
  cut_network& operator=(const cut_network&) = delete;

  vertex add_vertex() { return boost::add_vertex(graph_); }
  edge connect(vertex from, vertex to, std::int64_t capacity) {
    const auto there = boost::add_edge(from, to, graph_).first, back = boost::add_edge(to, from, graph_).first;
    graph_[there].capacity = capacity;
    graph_[there].reverse = back;
    graph_[back].reverse = there;
    return there;
  }
  void set_capacity(edge e, std::int64_t capacity) { graph_[e].capacity = capacity; }

  /// Finds a minimum cut. @return its capacity
  /// Complexity: a maximum flow (Boykov and Kolmogorov, IEEE PAMI 26(9), 2004).
  std::int64_t cut() {
    return boost::boykov_kolmogorov_max_flow(graph_, boost::get(&link::capacity, graph_), boost::get(&link::residual, graph_),
                                             boost::get(&link::reverse, graph_), boost::get(&node::predecessor, graph_),
                                             boost::get(&node::color, graph_), boost::get(&node::distance, graph_),
                                             boost::get(boost::vertex_index, graph_), source, sink);
  }
  /// Is `v` on the source's side of the last cut?
  bool reached(vertex v) const { return graph_[v].color == boost::black_color; }

 private:
  struct link {
    std::int64_t capacity = 0, residual = 0;
    edge reverse = {};
  };
  struct node {
    boost::default_color_type color = {};
    std::int64_t distance = 0;
    edge predecessor = {};
  };
  boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, node, link> graph_;
};

}  // namespace remat::detail
