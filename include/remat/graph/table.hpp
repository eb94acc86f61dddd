// SPDX-License-Identifier: Apache-2.0
/// @file
/// Cost models made of columns: containers, functions or property maps.
#pragma once

#include <concepts>
#include <stdexcept>
#include <string>
#include <utility>

#include <remat/core/error.hpp>

namespace remat {

namespace detail {

/// The entry of `column` for `v`: `column(v)`, `column.at(v)` or, for property maps, `get(column, v)`.
/// @throws bad_problem naming `what` if a container has no entry for `v`
template <class Column, class V>
auto look_up(const Column& column, const V& v, const char* what) {
  if constexpr (std::invocable<const Column&, const V&>) {
    return column(v);
  } else if constexpr (requires { column.at(v); }) {
    try {
      return column.at(v);
    } catch (const std::out_of_range&) {
      if constexpr (std::integral<V>)
        throw bad_problem(std::string(what) + ": no entry for vertex " + std::to_string(v));
      else
        throw bad_problem(std::string(what) + ": no entry for a vertex");
    }
  } else {
    return get(column, v);
  }
}

}  // namespace detail

/// A column of a `table`, for `seconds(v)`. The column is held by value. It is a callable (`column(v)`), a container
/// (`column.at(v)`: a vector indexed by vertices, or a map) or a Boost property map (`get(column, v)`).
template <class Column>
struct seconds_of {
  Column column;
  explicit seconds_of(Column c) : column(std::move(c)) {}
  template <class V>
  auto seconds(const V& v) const {
    return detail::look_up(column, v, "seconds");
  }
};

/// As `seconds_of`, for `bytes(v)`.
template <class Column>
struct bytes_of {
  Column column;
  explicit bytes_of(Column c) : column(std::move(c)) {}
  template <class V>
  auto bytes(const V& v) const {
    return detail::look_up(column, v, "bytes");
  }
};

/// As `seconds_of`, for `workspace(v)`.
template <class Column>
struct workspace_of {
  Column column;
  explicit workspace_of(Column c) : column(std::move(c)) {}
  template <class V>
  auto workspace(const V& v) const {
    return detail::look_up(column, v, "workspace");
  }
};

/// As `seconds_of`, for `once(v)`.
template <class Column>
struct once_of {
  Column column;
  explicit once_of(Column c) : column(std::move(c)) {}
  template <class V>
  bool once(const V& v) const {
    return detail::look_up(column, v, "once");
  }
};

/// As `seconds_of`, for `held(v)`.
template <class Column>
struct held_of {
  Column column;
  explicit held_of(Column c) : column(std::move(c)) {}
  template <class V>
  bool held(const V& v) const {
    return detail::look_up(column, v, "held");
  }
};

/// As `seconds_of`, for `source(v)`.
template <class Column>
struct source_of {
  Column column;
  explicit source_of(Column c) : column(std::move(c)) {}
  template <class V>
  bool source(const V& v) const {
    return detail::look_up(column, v, "source");
  }
};

/// As `seconds_of`, for `backward(v)`.
template <class Column>
struct backward_of {
  Column column;
  explicit backward_of(Column c) : column(std::move(c)) {}
  template <class V>
  bool backward(const V& v) const {
    return detail::look_up(column, v, "backward");
  }
};

/// As `seconds_of`, for `target(v)`.
template <class Column>
struct target_of {
  Column column;
  explicit target_of(Column c) : column(std::move(c)) {}
  template <class V>
  bool target(const V& v) const {
    return detail::look_up(column, v, "target");
  }
};

/// As `seconds_of`, for `name(v)`.
template <class Column>
struct name_of {
  Column column;
  explicit name_of(Column c) : column(std::move(c)) {}
  template <class V>
  std::string name(const V& v) const {
    return detail::look_up(column, v, "name");
  }
};

/// A cost model made of columns; `seconds_of` (or `roofline_of`) and `bytes_of` are needed, the others are optional.
/// Complexity: one look-up in a column per call.
/// @tparam Columns types with the members of a `cost_model`
/// @code
/// remat::table cost{remat::seconds_of(times), remat::bytes_of([&](int v) { return 4 * elements[v]; }),
///                   remat::held_of(is_weight)};
/// static_assert(remat::cost_model<decltype(cost), network>);
/// static_assert(!remat::cost_model<remat::table<remat::seconds_of<std::vector<double>>>, network>);   // no bytes
/// @endcode
template <class... Columns>
struct table : Columns... {};

template <class... Columns>
table(Columns...) -> table<Columns...>;

}  // namespace remat
