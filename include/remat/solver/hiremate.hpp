// SPDX-License-Identifier: Apache-2.0
/// @file
/// HiRemate: rematerialization in parts of parts, for graphs of any shape. Needs Boost.Graph and Eigen.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <remat/core/solve.hpp>
#include <remat/hierarchy/join_by_hilp.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/checkmate.hpp>
#include <remat/solver/hierarchical.hpp>

namespace remat {

/// HiRemate: cuts a graph into parts, and these into parts again, down to some dozens of operations. Inner solves the smallest
/// parts for several bounds. At each level above, the hierarchical ILP (`join_by_hilp`) chooses an option of each part, and the
/// values to keep and recompute between parts: for several bounds again, and at the top for the budget. Minimum cuts and local
/// search take no part; they are options of `hierarchical`, `improved` and `automatic`.
///
/// Differences from the published method: the parts are those of `find_partition`, even where they form no chain; `hilp_model`
/// lists the differences of the ILP. Does not use copies to the host.
///
/// @tparam B     the MILP backend
/// @tparam Inner the solver of the smallest parts
///
/// Complexity: per distinct part `saved` * `peaks` calls of Inner, or ILPs of at most some `cut.most` parts.
///
/// Reference: Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois, Beaumont, "HiRemate: Hierarchical Approach for Efficient
/// Re-materialization of Neural Networks", 2024.
/// @code
/// auto r = remat::solve(p, budget, remat::hiremate<remat::highs::backend>{}, {.seconds = 60});
/// @endcode
template <milp::backend B, solver Inner = checkmate<B>>
class hiremate : public hierarchical<Inner, join_by_hilp<B>> {
  using base = hierarchical<Inner, join_by_hilp<B>>;

 public:
  struct options {
    structure::partition_options cut = {.size = 30, .most = 12};  ///< how graphs are cut, at every level
    std::size_t leaf_operations = 60;                             ///< parts of more operations are cut again
    std::size_t saved = 4;    ///< number of bounds to try on the bytes that a part saves, >= 1
    std::size_t peaks = 2;    ///< number of bounds to try on the peak of a part, >= 1
    std::size_t choices = 4;  ///< options of a part that the ILP may choose from, >= 1
  };

  explicit hiremate(B backend = B()) : hiremate(options{}, backend, checkmate<B>(checkmate<B>::options::fast(), backend)) {}
  /// @throws bad_option naming the member that is out of range
  hiremate(const options& o, B backend, Inner inner)
      : base(std::move(inner), join_by_hilp<B>({.choices = o.choices}, std::move(backend)), base::options::plain(o)) {}

  std::string name() const { return "hiremate/" + std::string(this->inner().name()); }
};

}  // namespace remat
