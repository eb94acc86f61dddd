// SPDX-License-Identifier: Apache-2.0
/// @file
/// The concept of a cost model.
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
/// Optional:
///
/// | expression       | gives                                                            | without it                          |
/// |------------------|------------------------------------------------------------------|-------------------------------------|
/// | `c.workspace(v)` | bytes needed while `v` runs, besides inputs and results          | 0                                   |
/// | `c.once(v)`      | whether `v` may run once only                                    | false                               |
/// | `c.held(v)`      | whether `v` is a source that is never dropped, not an operation  | false                               |
/// | `c.source(v)`    | whether `v` is a source that may be dropped, not an operation    | false                               |
/// | `c.backward(v)`  | whether `v` belongs to the backward of a training step           | the problem does not say            |
/// | `c.target(v)`    | whether the results of `v` must exist at the end                 | true for operations without readers |
/// | `c.reads(u, v)`  | range of numbers: the results of `u` that its reader `v` reads   | all results of `u`                  |
/// | `c.name(v)`      | label, also used in messages                                     | "vertex" and the index of `v`       |
/// | `c.kind(v)`      | free text, such as the ATen operator                             | ""                                  |
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

/// The optional members of a `cost_model`.
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

/// A cost model that has the optional members `M`. A member that is misspelt, or that takes another vertex type, would be ignored
/// without a message: assert next to the model which members it has. (Columns of a `table` cannot be misspelt.)
/// @code
/// static_assert(remat::cost_model_with<measured, network, remat::cost_member::workspace, remat::cost_member::held>);
/// @endcode
template <class C, class G, cost_member... M>
concept cost_model_with = cost_model<C, G> &&(detail::has_cost<C, vertex_t<G>, M>() && ...);

}  // namespace remat
