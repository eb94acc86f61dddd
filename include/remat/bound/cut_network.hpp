// SPDX-License-Identifier: Apache-2.0
/// @file
/// A flow network whose minimum cut is found repeatedly, each time with other capacities. Needs Boost.Graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc 12 misreads Boost's edge iterator
#endif
#include <boost/graph/boykov_kolmogorov_max_flow.hpp>
#include <boost/graph/compressed_sparse_row_graph.hpp>
#include <boost/property_map/property_map.hpp>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace remat::bound {

/// Thrown by a cut that `stop` has ended. The result of that cut is unknown; the network can be cut again.
struct interrupted {};

/// A flow network. Vertex 0 is the source, vertex 1 the sink; others are added. Capacities may change between cuts. Vertices and
/// edges cannot be added after the first cut, which lays the network out. Takes about 60 bytes per edge and 40 per vertex.
///
/// Precondition: the finite capacities sum to at most `max_total`. Then no sum of flows overflows, and no infinite edge is cut
/// where finite edges suffice.
class cut_network {
 public:
  using edge = std::uint32_t;
  using vertex = std::uint32_t;
  static constexpr vertex source = 0, sink = 1;
  static constexpr std::int64_t max_total = std::int64_t{1} << 57, infinite = 2 * max_total;

  /// @param stop polled before and within cuts, which take seconds for 100 000 operations; true ends a cut with `interrupted`
  explicit cut_network(std::function<bool()> stop = {}) : stop_(std::move(stop)) {}

  vertex add_vertex() { return vertices_++; }
  /// Adds an edge. A vertex may have at most one edge to the sink: the first step of Boost's algorithm uses only one of them.
  edge add_edge(vertex from, vertex to, std::int64_t capacity) {
    edge_ends_.emplace_back(from, to);
    edge_capacity_.push_back(capacity);
    return static_cast<edge>(edge_capacity_.size() - 1);
  }
  void set_capacity(edge e, std::int64_t capacity) { edge_capacity_[e] = capacity; }

  /// Finds a minimum cut.
  /// @return its capacity
  /// @throws interrupted if `stop` returns true
  /// Complexity: a maximum flow.
  /// Reference: Boykov and Kolmogorov, IEEE PAMI 26(9), 2004.
  std::int64_t cut() {
    if (stop_ && stop_()) throw interrupted();
    if (color_.empty()) lay_out();
    for (std::size_t e = 0; e < edge_capacity_.size(); ++e) capacity_[forward_arc_[e]] = edge_capacity_[e];
    const auto rows = boost::get(boost::edge_index, graph_);
    const auto vertices = boost::get(boost::vertex_index, graph_);
    return boost::boykov_kolmogorov_max_flow(
        graph_, boost::make_iterator_property_map(capacity_.begin(), rows), polled<arc, std::int64_t>(*this, residual_),
        boost::make_iterator_property_map(reverse_.begin(), rows), polled<vertex, arc>(*this, predecessor_),
        boost::make_iterator_property_map(color_.begin(), vertices),
        boost::make_iterator_property_map(distance_.begin(), vertices), vertices, source, sink);
  }
  /// Is `v` on the source's side of the last cut? Of all minimum cuts, the one with the fewest vertices on that side is taken.
  bool on_source_side(vertex v) const { return color_[v] == boost::black_color; }

 private:
  using graph = boost::compressed_sparse_row_graph<boost::directedS, boost::no_property, boost::no_property, boost::no_property,
                                                   vertex, edge>;
  using arc = boost::graph_traits<graph>::edge_descriptor;

  /// A property map that polls `stop` when an entry is read. Each step of the algorithm reads an entry: on a path, the arc that
  /// leads to a vertex; in a search, a residual capacity.
  template <class Key, class Value>
  class polled {
   public:
    using key_type = Key;
    using value_type = Value;
    using reference = Value;
    using category = boost::read_write_property_map_tag;

    polled(cut_network& network, std::vector<Value>& entries) : network_(&network), entries_(&entries) {}
    friend Value get(const polled& map, const Key& key) {
      map.poll();
      return map.at(key);
    }
    friend void put(const polled& map, const Key& key, const Value& x) { map.at(key) = x; }

   private:
    void poll() const { network_->poll(); }
    Value& at(const Key& key) const {
      if constexpr (std::is_same_v<Key, arc>)
        return (*entries_)[boost::get(boost::edge_index, network_->graph_, key)];
      else
        return (*entries_)[key];
    }
    cut_network* network_;
    std::vector<Value>* entries_;
  };
  void poll() {
    if (++polls_ % 4096 == 0 && stop_ && stop_()) throw interrupted();
  }

  /// Makes two arcs of each edge, forward and backward, and sorts all arcs by the vertex that they leave.
  void lay_out() {
    std::vector<edge> next(vertices_ + std::size_t{1}, 0);
    for (const auto& [from, to] : edge_ends_) ++next[from + 1], ++next[to + 1];
    for (vertex v = 0; v < vertices_; ++v) next[v + 1] += next[v];
    std::vector<std::pair<vertex, vertex>> arcs(2 * edge_ends_.size());
    forward_arc_.resize(edge_ends_.size());
    reverse_.resize(arcs.size());
    for (std::size_t e = 0; e < edge_ends_.size(); ++e) {
      const auto [from, to] = edge_ends_[e];
      const auto forward = next[from]++, backward = next[to]++;
      arcs[forward] = {from, to};
      arcs[backward] = {to, from};
      reverse_[forward] = arc(to, backward);
      reverse_[backward] = arc(from, forward);
      forward_arc_[e] = forward;
    }
    std::vector<std::pair<vertex, vertex>>().swap(edge_ends_);
    graph_ = graph(boost::edges_are_sorted, arcs.begin(), arcs.end(), vertices_);
    capacity_.assign(arcs.size(), 0);
    residual_.resize(arcs.size());
    predecessor_.resize(vertices_);
    color_.resize(vertices_);
    distance_.resize(vertices_);
  }

  std::function<bool()> stop_;
  std::size_t polls_ = 0;
  vertex vertices_ = 2;
  std::vector<std::pair<vertex, vertex>> edge_ends_;  // of the edges; empty after the first cut
  std::vector<std::int64_t> edge_capacity_;           // capacities of the edges
  std::vector<edge> forward_arc_;                     // forward arc of each edge
  graph graph_;
  std::vector<std::int64_t> capacity_, residual_;  // of the arcs
  std::vector<arc> reverse_;
  std::vector<arc> predecessor_;  // of the vertices
  std::vector<boost::default_color_type> color_;
  std::vector<std::int32_t> distance_;
};

}  // namespace remat::bound
