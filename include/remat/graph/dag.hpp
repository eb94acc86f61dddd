// SPDX-License-Identifier: Apache-2.0
/// @file
/// The concept of a graph.
#pragma once

#include <concepts>
#include <cstddef>
#include <ranges>

namespace remat {

/// How the library reads a graph of type `G`. Specialise it for your own type:
/// @code
/// struct network { std::vector<std::vector<int>> operands; std::vector<int> ids; };
/// template <> struct remat::dag_traits<network> {
///   using vertex = int;
///   static const auto& vertices(const network& n) { return n.ids; }                       // in any order; each once
///   static const auto& inputs(const network& n, int v) { return n.operands.at(v); }       // vertices whose results v reads
///   static std::size_t index(const network&, int v) { return v; }                         // one to one onto 0 .. n - 1
/// };
/// @endcode
/// A graph that knows the readers of a vertex instead of its operands has `outputs(g, v)` instead of `inputs(g, v)`.
template <class G>
struct dag_traits;

template <class G>
using vertex_t = typename dag_traits<G>::vertex;

namespace detail {

template <class R, class T>
concept range_of = std::ranges::input_range<R> && std::convertible_to<std::ranges::range_reference_t<R>, T>;

template <class G>
concept has_inputs = requires(const G& g, const vertex_t<G>& v) {
  { dag_traits<G>::inputs(g, v) } -> range_of<vertex_t<G>>;
};

template <class G>
concept has_outputs = requires(const G& g, const vertex_t<G>& v) {
  { dag_traits<G>::outputs(g, v) } -> range_of<vertex_t<G>>;
};

}  // namespace detail

/// A directed graph whose vertices are operations and whose edges run from an operation to the readers of its results.
///
/// Every range is read once per call and may be single-pass. `freeze` throws if the graph has a cycle, if `index` is not one to
/// one, or if an operation reads a vertex that is not listed.
///
/// | expression                       | gives                                                     |
/// |----------------------------------|-----------------------------------------------------------|
/// | `dag_traits<G>::vertices(g)`     | input range of all vertices                               |
/// | `dag_traits<G>::inputs(g, v)`    | input range of the vertices that `v` reads, or            |
/// | `dag_traits<G>::outputs(g, v)`   | input range of the vertices that read `v`                 |
/// | `dag_traits<G>::index(g, v)`     | number of `v`, 0 <= number < count of vertices, in O(1)   |
/// @code
/// static_assert(remat::dag<network>);             // with the traits above
/// static_assert(!remat::dag<std::vector<int>>);   // no dag_traits
/// @endcode
template <class G>
concept dag = std::copyable<vertex_t<G>> && std::equality_comparable<vertex_t<G>> && requires(const G& g, const vertex_t<G>& v) {
  { dag_traits<G>::vertices(g) } -> detail::range_of<vertex_t<G>>;
  { dag_traits<G>::index(g, v) } -> std::convertible_to<std::size_t>;
} &&(detail::has_inputs<G> || detail::has_outputs<G>);

}  // namespace remat
