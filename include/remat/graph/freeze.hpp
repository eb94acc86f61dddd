// SPDX-License-Identifier: Apache-2.0
/// @file
/// Turns any graph with a cost model into the `problem` that solvers take.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/topological_order.hpp>
#include <remat/graph/cost_model.hpp>
#include <remat/graph/dag.hpp>

namespace remat {

/// Parts of a problem that a graph and its costs do not contain.
struct freeze_options {
  std::string name = {};                  ///< name of the problem
  std::optional<copy_rates> copies = {};  ///< rates of the copies between device and host; nothing: no copies
};

/// A frozen graph: its problem, and the map between vertices and operations or values. Converts to the problem.
/// @tparam G a `dag`
template <class G>
struct frozen {
  /// A result of a vertex.
  struct origin {
    vertex_t<G> vertex;
    std::size_t result;  ///< number of the result
  };
  /// The operation and the values of a vertex.
  struct vertex_entry {
    operation_id operation = none;  ///< `none` for a source
    value_id first = none;          ///< value of the first result; the values of the other results follow
    std::size_t results = 0;
  };

  remat::problem problem;
  std::vector<vertex_t<G>> operations;  ///< vertex of each operation
  std::vector<origin> values;           ///< vertex and number of the result, for each value
  std::vector<vertex_entry> vertices;   ///< operation and values of each vertex, by its index

  /// The operation of `v`; `none` for a source.
  operation_id operation_of(const G& g, const vertex_t<G>& v) const { return vertices.at(dag_traits<G>::index(g, v)).operation; }
  /// The value of a result of `v`.
  /// @throws bad_option if `v` has no result of that number
  value_id value_of(const G& g, const vertex_t<G>& v, std::size_t result = 0) const {
    const auto& x = vertices.at(dag_traits<G>::index(g, v));
    if (result >= x.results)
      throw bad_option("value_of: result " + std::to_string(result) + " of a vertex that has " + std::to_string(x.results));
    return value_id(x.first + result);
  }
  operator const remat::problem&() const { return problem; }
};

namespace detail {

/// Finds a cycle of a graph whose topological order is incomplete.
/// @return its vertices in the direction of the edges, the smallest first
/// Complexity: O(V + E).
inline std::vector<std::size_t> find_cycle(const std::vector<std::vector<std::size_t>>& inputs,
                                           const std::vector<std::size_t>& order) {
  std::vector<bool> ordered(inputs.size(), false);
  for (auto v : order) ordered[v] = true;
  std::vector<std::size_t> path;
  std::vector<bool> on_path(inputs.size(), false);
  auto v = static_cast<std::size_t>(std::find(ordered.begin(), ordered.end(), false) - ordered.begin());
  while (!on_path[v]) {  // go backwards: every unordered vertex has an unordered input
    on_path[v] = true;
    path.push_back(v);
    v = *std::find_if(inputs[v].begin(), inputs[v].end(), [&](std::size_t u) { return !ordered[u]; });
  }
  path.erase(path.begin(), std::find(path.begin(), path.end(), v));
  std::reverse(path.begin(), path.end());
  std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
  return path;
}

/// Converts a size from a cost model. @throws bad_problem naming `what` unless 0 <= x <= 2^53
template <class T>
bytes_t checked_bytes(const T& x, const std::string& what) {
  if constexpr (std::is_arithmetic_v<T>) {
    if constexpr (std::is_signed_v<T>)
      if (x < 0) throw bad_problem(what + " is negative: " + std::to_string(x));
    if constexpr (std::is_floating_point_v<T>)
      if (!std::isfinite(x)) throw bad_problem(what + " is not a finite number: " + std::to_string(x));
    if (static_cast<long double>(x) > static_cast<long double>(max_bytes))
      throw bad_problem(what + " is beyond 2^53: " + std::to_string(x));
    return static_cast<bytes_t>(x);
  } else {
    return checked_bytes<bytes_t>(x, what);
  }
}

/// The steps of `freeze`. To be used once.
template <class G, class C>
class freezer {
 public:
  freezer(const G& g, const C& c) : graph_(g), costs_(c) {
    list_vertices();
    read_edges();
  }

  frozen<G> run(const freeze_options& o) {
    const auto order = topological_positions();
    frozen_.vertices.resize(vertices_.size());
    results_.resize(vertices_.size());
    for (auto i : order) add_vertex(i);
    frozen_.problem = problem(o.name, std::move(values_), std::move(operations_), std::move(targets_), o.copies, backward_start_);
    return std::move(frozen_);
  }

 private:
  using traits = dag_traits<G>;
  using vertex = vertex_t<G>;
  template <cost_member M>
  static constexpr bool has = cost_model_with<C, G, M>;

  std::string label(const vertex& v) const {
    std::string name;
    if constexpr (has<cost_member::name>) name = costs_.name(v);
    return name.empty() ? "vertex " + std::to_string(static_cast<std::size_t>(traits::index(graph_, v))) : name;
  }

  /// Lists the vertices, those of the forward first, and finds the position of each in this list.
  void list_vertices() {
    for (auto&& v : traits::vertices(graph_)) vertices_.push_back(v);
    if constexpr (has<cost_member::backward>)
      std::stable_partition(vertices_.begin(), vertices_.end(), [&](const vertex& v) { return !costs_.backward(v); });
    const auto n = vertices_.size();
    positions_.assign(n, n);
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t index = traits::index(graph_, vertices_[i]);
      if (index >= n)
        throw bad_problem(label(vertices_[i]) + ": index " + std::to_string(index) + " is not below the number of vertices, " +
                          std::to_string(n));
      if (positions_[index] != n)
        throw bad_problem(label(vertices_[i]) + ": index " + std::to_string(index) + " is that of " +
                          label(vertices_[positions_[index]]) + " too");
      positions_[index] = i;
    }
  }

  /// The position of `v`, which is an input or a reader of `neighbour`.
  std::size_t position(const vertex& v, const char* role, const vertex& neighbour) const {
    const std::size_t index = traits::index(graph_, v);
    if (index >= vertices_.size() || !(vertices_[positions_[index]] == v))
      throw bad_problem(label(neighbour) + ": " + role + " with index " + std::to_string(index) +
                        " is not a vertex of the graph");
    return positions_[index];
  }

  /// Finds the inputs of each vertex, and the vertices that another vertex reads.
  void read_edges() {
    inputs_.resize(vertices_.size());
    for (std::size_t i = 0; i < vertices_.size(); ++i)
      if constexpr (has_inputs<G>)
        for (auto&& u : traits::inputs(graph_, vertices_[i])) inputs_[i].push_back(position(u, "an input", vertices_[i]));
      else
        for (auto&& w : traits::outputs(graph_, vertices_[i])) inputs_[position(w, "a reader", vertices_[i])].push_back(i);
    is_read_.assign(vertices_.size(), false);
    for (auto& inputs : inputs_) {
      std::sort(inputs.begin(), inputs.end());
      inputs.erase(std::unique(inputs.begin(), inputs.end()), inputs.end());
      for (auto u : inputs) is_read_[u] = true;
    }
  }

  /// @throws not_a_dag if the graph has a cycle
  std::vector<std::size_t> topological_positions() const {
    auto order = topological_order(inputs_, [](std::size_t i) { return i; });
    if (order.size() == vertices_.size()) return order;
    std::string names;
    const auto cycle = find_cycle(inputs_, order);
    for (auto i : cycle) names += label(vertices_[i]) + " -> ";
    throw not_a_dag("the graph has a cycle: " + names + label(vertices_[cycle.front()]));
  }

  /// Makes the values of a vertex and, unless the vertex is a source, its operation. Its inputs have been added.
  void add_vertex(std::size_t i) {
    const auto& v = vertices_[i];
    const auto name = label(v);
    bool held = false, source = false;
    if constexpr (has<cost_member::held>) held = source = costs_.held(v);
    if constexpr (has<cost_member::source>) source = source || costs_.source(v);
    if (source && !inputs_[i].empty())
      throw bad_problem(name + ": a " + (held ? "held vertex is a source" : "source") + ", but it has inputs");
    auto& entry = frozen_.vertices[static_cast<std::size_t>(traits::index(graph_, v))];
    entry.first = values_.size();
    add_results(i, name, held);
    entry.results = results_[i].size();
    bool target = !is_read_[i] && !source;
    if constexpr (has<cost_member::target>) target = costs_.target(v);
    if (target) targets_.insert(targets_.end(), results_[i].begin(), results_[i].end());
    if (source) return;
    entry.operation = operations_.size();
    if constexpr (has<cost_member::backward>) {
      if (costs_.backward(v)) {
        if (!backward_start_) backward_start_ = entry.operation;
      } else if (backward_start_) {
        throw bad_problem(name + ": belongs to the forward, but needs the backward");
      }
    }
    operations_.push_back(make_operation(i, name));
    frozen_.operations.push_back(v);
  }

  /// Makes a value of each result of a vertex.
  void add_results(std::size_t i, const std::string& name, bool held) {
    const auto& v = vertices_[i];
    const auto add = [&](const auto& bytes, const std::string& suffix) {
      frozen_.values.push_back({v, results_[i].size()});
      results_[i].push_back(static_cast<index_t>(values_.size()));
      values_.push_back({name + suffix, checked_bytes(bytes, name + ": bytes" + suffix), held});
    };
    if constexpr (range_of<decltype(costs_.bytes(v)), bytes_t>) {
      std::size_t k = 0;
      for (auto&& bytes : costs_.bytes(v)) add(bytes, "[" + std::to_string(k++) + "]");
    } else {
      add(costs_.bytes(v), "");
    }
  }

  operation make_operation(std::size_t i, const std::string& name) const {
    const auto& v = vertices_[i];
    operation op;
    op.name = name;
    op.outputs = results_[i];
    op.seconds = costs_.seconds(v);
    if (!std::isfinite(op.seconds) || op.seconds < 0)
      throw bad_problem(name + ": seconds is not a finite number >= 0: " + std::to_string(op.seconds));
    if constexpr (has<cost_member::workspace>) op.workspace = checked_bytes(costs_.workspace(v), name + ": workspace");
    if constexpr (has<cost_member::once>) op.once = costs_.once(v);
    if constexpr (has<cost_member::kind>) op.kind = costs_.kind(v);
    for (auto u : inputs_[i])
      if constexpr (has<cost_member::reads>) {
        for (auto&& k : costs_.reads(vertices_[u], v)) {
          const auto number = static_cast<std::size_t>(k);
          if (number >= results_[u].size())
            throw bad_problem(name + ": reads result " + std::to_string(number) + " of " + label(vertices_[u]) + ", which has " +
                              std::to_string(results_[u].size()));
          op.inputs.push_back(results_[u][number]);
        }
      } else {
        op.inputs.insert(op.inputs.end(), results_[u].begin(), results_[u].end());
      }
    return op;
  }

  const G& graph_;
  const C& costs_;
  std::vector<vertex> vertices_;
  std::vector<std::size_t> positions_;            // in `vertices_`, by index of the graph; the other lists are by position
  std::vector<std::vector<std::size_t>> inputs_;  // ascending
  std::vector<bool> is_read_;                     // by another vertex
  std::vector<std::vector<value_id>> results_;    // values of each vertex
  std::vector<value> values_;
  std::vector<operation> operations_;
  std::vector<value_id> targets_;
  std::optional<operation_id> backward_start_;
  frozen<G> frozen_;
};

}  // namespace detail

/// Freezes a graph and its costs into a problem.
///
/// A vertex becomes an operation, and its result a value (several values, if `bytes(v)` is a range). Both have the name of the
/// vertex. A vertex for which `held(v)` or `source(v)` is true becomes a source. Operations keep the order in which the graph
/// lists its vertices, as far as their inputs permit. If the cost model has `backward(v)`, the forward comes first.
///
/// @tparam G a graph
/// @tparam C its costs
/// @param g the graph, V vertices, E edges
/// @param c the costs
/// @param o name of the problem, rates of copies
/// @return the problem, with the vertex of each operation and value
/// @throws not_a_dag with the vertices of a cycle in order; bad_problem naming the vertex: an index out of range or taken, an
///         input or reader that the graph does not list, a cost that is negative or not finite, a source with inputs, a read of
///         a result that the producer does not have, a forward vertex that reads the backward
/// Complexity: O(V log V + E).
/// @code
/// auto f = remat::freeze(net, measured{&net});
/// auto r = remat::solve(f, 1 << 30, remat::rotor{});
/// if (r.found()) remat::execute(f, r.schedule, device);
/// @endcode
template <dag G, cost_model<G> C>
frozen<G> freeze(const G& g, const C& c, const freeze_options& o = {}) {
  return detail::freezer(g, c).run(o);
}

}  // namespace remat
