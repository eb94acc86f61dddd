// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the library asks of a cost model.
#pragma once

#include <concepts>

#include <remat/core/problem.hpp>
#include <remat/graph/dag.hpp>

namespace remat {

namespace detail {
template <class T>
concept size_or_sizes = std::convertible_to<T, bytes_t> || range_of<T, bytes_t>;
}  // namespace detail

/// The costs of the operations of a graph.
///
/// Required:
///
/// | expression     | gives                                                                                                 |
/// |----------------|-------------------------------------------------------------------------------------------------------|
/// | `c.seconds(v)` | time of one execution of `v`, s, finite, >= 0                                                         |
/// | `c.bytes(v)`   | size of its result, bytes, >= 0; or a range of sizes, for an operation with several results           |
///
/// Read where they are there:
///
/// | expression       | gives                                                             | otherwise                          |
/// |------------------|-------------------------------------------------------------------|------------------------------------|
/// | `c.workspace(v)` | bytes needed while it runs                                        | 0                                  |
/// | `c.once(v)`      | whether it may run once only                                      | false                              |
/// | `c.held(v)`      | whether `v` is no operation but a source that is never dropped    | false                              |
/// | `c.source(v)`    | whether `v` is no operation but there at the start, to be dropped | false                              |
/// | `c.backward(v)`  | whether `v` belongs to the backward of a training step            | the problem does not say           |
/// | `c.target(v)`    | whether its results must be there at the end                      | true if nothing reads `v`          |
/// | `c.reads(u, v)`  | range of the numbers of the results of `u` that its reader `v` reads | all                             |
/// | `c.name(v)`      | label, for messages too                                           | "vertex" and its index             |
/// | `c.kind(v)`      | free text, such as the ATen operator                              | ""                                 |
/// @code
/// struct measured { double seconds(int v) const; std::int64_t bytes(int v) const; };
/// struct timed { double seconds(int v) const; };
/// static_assert(remat::cost_model<measured, network>);
/// static_assert(!remat::cost_model<timed, network>);   // no bytes(v)
/// @endcode
template <class C, class G>
concept cost_model = dag<G> && requires(const C& c, const vertex_t<G>& v) {
  { c.seconds(v) } -> std::convertible_to<double>;
  { c.bytes(v) } -> detail::size_or_sizes;
};

/// What a cost model may have besides `seconds` and `bytes`, see `cost_model`.
enum class cost_member { workspace, once, held, source, backward, target, reads, name, kind };

namespace detail {

template <class C, class V, cost_member M>
consteval bool has_cost() {
  if constexpr (M == cost_member::workspace) return requires(const C& c, const V& v) {
      c.workspace(v);
    };
  if constexpr (M == cost_member::once) return requires(const C& c, const V& v) {
      c.once(v);
    };
  if constexpr (M == cost_member::held) return requires(const C& c, const V& v) {
      c.held(v);
    };
  if constexpr (M == cost_member::source) return requires(const C& c, const V& v) {
      c.source(v);
    };
  if constexpr (M == cost_member::backward) return requires(const C& c, const V& v) {
      c.backward(v);
    };
  if constexpr (M == cost_member::target) return requires(const C& c, const V& v) {
      c.target(v);
    };
  if constexpr (M == cost_member::reads) return requires(const C& c, const V& v) {
      c.reads(v, v);
    };
  if constexpr (M == cost_member::name) return requires(const C& c, const V& v) {
      c.name(v);
    };
  if constexpr (M == cost_member::kind) return requires(const C& c, const V& v) {
      c.kind(v);
    };
}

}  // namespace detail

/// A cost model whose members M are read too. What is misspelt or takes another vertex is no such member, and would be ignored:
/// say next to the model what it is to have. (Columns of a `table` cannot be misspelt.)
/// @code
/// static_assert(remat::gives<measured, network, remat::cost_member::workspace, remat::cost_member::held>);
/// @endcode
template <class C, class G, cost_member... M>
concept gives = cost_model<C, G> &&(detail::has_cost<C, vertex_t<G>, M>() && ...);

}  // namespace remat
