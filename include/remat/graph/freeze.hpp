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
  struct part {
    operation_id operation = none;  ///< `none` for a source
    value_id first = none;          ///< value of the first result; the values of the other results follow
    std::size_t results = 0;
  };

  remat::problem problem;
  std::vector<vertex_t<G>> operations;  ///< vertex of each operation
  std::vector<origin> values;           ///< vertex and number of the result, for each value
  std::vector<part> parts;              ///< operation and values of each vertex, by its index

  /// The operation of `v`; `none` for a source.
  operation_id operation_of(const G& g, const vertex_t<G>& v) const { return parts.at(dag_traits<G>::index(g, v)).operation; }
  /// The value of a result of `v`.
  /// @throws bad_option if `v` has no result of that number
  value_id value_of(const G& g, const vertex_t<G>& v, std::size_t result = 0) const {
    const auto& x = parts.at(dag_traits<G>::index(g, v));
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
  using traits = dag_traits<G>;
  using vertex = vertex_t<G>;

  const auto label = [&](const vertex& v) {
    std::string name;
    if constexpr (gives<C, G, cost_member::name>) name = c.name(v);
    return name.empty() ? "vertex " + std::to_string(static_cast<std::size_t>(traits::index(g, v))) : name;
  };

  std::vector<vertex> vertices;
  for (auto&& v : traits::vertices(g)) vertices.push_back(v);
  if constexpr (gives<C, G, cost_member::backward>)
    std::stable_partition(vertices.begin(), vertices.end(), [&](const vertex& v) { return !c.backward(v); });
  const auto n = vertices.size();
  std::vector<std::size_t> position(n, n);  // position in `vertices`, by index
  for (std::size_t at = 0; at < n; ++at) {
    const std::size_t i = traits::index(g, vertices[at]);
    if (i >= n)
      throw bad_problem(label(vertices[at]) + ": index " + std::to_string(i) + " is not below the number of vertices, " +
                        std::to_string(n));
    if (position[i] != n)
      throw bad_problem(label(vertices[at]) + ": index " + std::to_string(i) + " is that of " + label(vertices[position[i]]) +
                        " too");
    position[i] = at;
  }

  std::vector<std::vector<std::size_t>> inputs(n);
  const auto find = [&](const vertex& v, const char* role, const vertex& of) {
    const std::size_t i = traits::index(g, v);
    if (i >= n || !(vertices[position[i]] == v))
      throw bad_problem(label(of) + ": " + role + " with index " + std::to_string(i) + " is not a vertex of the graph");
    return position[i];
  };
  for (std::size_t at = 0; at < n; ++at)
    if constexpr (detail::has_inputs<G>)
      for (auto&& u : traits::inputs(g, vertices[at])) inputs[at].push_back(find(u, "an input", vertices[at]));
    else
      for (auto&& w : traits::outputs(g, vertices[at])) inputs[find(w, "a reader", vertices[at])].push_back(at);
  std::vector<bool> is_read(n, false);
  for (auto& all : inputs) {
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    for (auto u : all) is_read[u] = true;
  }

  const auto order = topological_order(inputs, [](std::size_t at) { return at; });
  if (order.size() < n) {
    std::string names;
    const auto cycle = detail::find_cycle(inputs, order);
    for (auto at : cycle) names += label(vertices[at]) + " -> ";
    throw not_a_dag("the graph has a cycle: " + names + label(vertices[cycle.front()]));
  }

  frozen<G> f;
  f.parts.resize(n);
  std::optional<operation_id> backward_start;
  std::vector<value> values;
  std::vector<operation> operations;
  std::vector<value_id> targets;
  std::vector<std::vector<value_id>> results(n);  // values of each vertex
  for (auto at : order) {
    const auto& v = vertices[at];
    const auto name = label(v);
    bool held = false, source = false;
    if constexpr (gives<C, G, cost_member::held>) held = source = c.held(v);
    if constexpr (gives<C, G, cost_member::source>) source = source || c.source(v);
    if (source && !inputs[at].empty())
      throw bad_problem(name + ": a " + (held ? "held vertex is a source" : "source") + ", but it has inputs");

    auto& part = f.parts[static_cast<std::size_t>(traits::index(g, v))];
    part.first = values.size();
    const auto add = [&](const auto& bytes, const std::string& which) {
      results[at].push_back(static_cast<index_t>(values.size()));
      values.push_back({name + which, detail::checked_bytes(bytes, name + ": bytes" + which), held});
      f.values.push_back({v, part.results++});
    };
    if constexpr (detail::range_of<decltype(c.bytes(v)), bytes_t>) {
      std::size_t k = 0;
      for (auto&& bytes : c.bytes(v)) add(bytes, "[" + std::to_string(k++) + "]");
    } else {
      add(c.bytes(v), "");
    }

    bool target = !is_read[at] && !source;
    if constexpr (gives<C, G, cost_member::target>) target = c.target(v);
    if (target) targets.insert(targets.end(), results[at].begin(), results[at].end());
    if (source) continue;
    part.operation = operations.size();
    if constexpr (gives<C, G, cost_member::backward>) {
      if (c.backward(v)) {
        if (!backward_start) backward_start = part.operation;
      } else if (backward_start) {
        throw bad_problem(name + ": belongs to the forward, but needs the backward");
      }
    }

    operation op;
    op.name = name;
    op.outputs = results[at];
    op.seconds = c.seconds(v);
    if (!std::isfinite(op.seconds) || op.seconds < 0)
      throw bad_problem(name + ": seconds is not a finite number >= 0: " + std::to_string(op.seconds));
    if constexpr (gives<C, G, cost_member::workspace>) op.workspace = detail::checked_bytes(c.workspace(v), name + ": workspace");
    if constexpr (gives<C, G, cost_member::once>) op.once = c.once(v);
    if constexpr (gives<C, G, cost_member::kind>) op.kind = c.kind(v);
    for (auto u : inputs[at])
      if constexpr (gives<C, G, cost_member::reads>) {
        for (auto&& k : c.reads(vertices[u], v)) {
          const auto which = static_cast<std::size_t>(k);
          if (which >= results[u].size())
            throw bad_problem(name + ": reads result " + std::to_string(which) + " of " + label(vertices[u]) + ", which has " +
                              std::to_string(results[u].size()));
          op.inputs.push_back(results[u][which]);
        }
      } else {
        op.inputs.insert(op.inputs.end(), results[u].begin(), results[u].end());
      }
    operations.push_back(std::move(op));
    f.operations.push_back(v);
  }
  f.problem = problem(o.name, std::move(values), std::move(operations), std::move(targets), o.copies, backward_start);
  return f;
}

}  // namespace remat
