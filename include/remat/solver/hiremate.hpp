// SPDX-License-Identifier: Apache-2.0
/// @file
/// Rematerialization in parts of parts, of graphs of any shape. Needs Boost.Graph and Eigen.
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

/// HiRemate: parts of parts, down to some dozens of operations, which Inner solves for several bounds; at each level above, the
/// hierarchical ILP chooses an option of each part and what is retained and computed again between them (`join_by_hilp`), for
/// several bounds again, and at the top for the budget. That and nothing more: for minimum cuts, local search and the like
/// around it, there are the options of `hierarchical`, `improved` and `automatic`.
///
/// As published but for what it is made of: the parts are those of `find_partition`, also where they are no chain; `hilp_model`
/// says what the program does differently. Copies to the host are not used.
///
/// @tparam B     the MILP backend
/// @tparam Inner the solver of the smallest parts
///
/// Complexity: per distinct part `saved` * `peaks` calls of Inner, or programs of at most some `cut.most` parts.
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
    std::size_t saved = 4;                                        ///< bounds on what a part saves that are tried, >= 1
    std::size_t peaks = 2;                                        ///< bounds on a part's peak that are tried, >= 1
    std::size_t choices = 4;                                      ///< options of a part that the ILP may choose from, >= 1
  };

  explicit hiremate(B backend = B()) : hiremate(options{}, backend, checkmate<B>(checkmate<B>::options::fast(), backend)) {}
  /// @throws bad_option naming the member that is out of range
  hiremate(const options& o, B backend, Inner inner)
      : base(std::move(inner), join_by_hilp<B>({.choices = o.choices}, std::move(backend)), base::options::plain(o)) {}

  std::string name() const { return "hiremate/" + std::string(this->inner().name()); }
};

}  // namespace remat
