// SPDX-License-Identifier: Apache-2.0
/// @file
/// A MILP backend that is chosen at run time. Needs Eigen.
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include <remat/milp/backend.hpp>

namespace remat::milp {

/// Holds any backend, by value. Models are built as for the backend inside (`longest_row`).
/// Complexity: one indirect call more than the backend.
/// @code
/// remat::milp::any_backend library = remat::highs::backend();
/// if (prefer_glpk) library = remat::glpk::backend();
/// const remat::checkmate<remat::milp::any_backend> method({}, library);
/// @endcode
class any_backend {
 public:
  /// @param b the backend; converts implicitly
  template <class B>
  requires(!std::same_as<std::remove_cvref_t<B>, any_backend> && backend<B>) any_backend(B b)  // NOLINT: implicit on purpose
      : longest_row(milp::longest_row(b)),
        name_(b.name()),
        solve_([b = std::move(b)](const model& m, const options& o) { return b.solve(m, o); }) {}

  std::size_t longest_row;  ///< see `backend`

  std::string name() const { return name_; }
  /// @throws any exception of the backend
  solution solve(const model& m, const options& o) const { return solve_(m, o); }

 private:
  std::string name_;
  std::function<solution(const model&, const options&)> solve_;
};

static_assert(backend<any_backend>);

}  // namespace remat::milp
