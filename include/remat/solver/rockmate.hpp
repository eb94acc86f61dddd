// SPDX-License-Identifier: Apache-2.0
/// @file
/// Two-level rematerialization: parts by any solver, their chain by dynamic programming. Needs Boost.Graph.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <remat/core/solve.hpp>
#include <remat/hierarchy/join_by_chain.hpp>
#include <remat/solver/hierarchical.hpp>

namespace remat {

/// Rockmate: the graph is cut into a chain of parts, another solver is asked for several options of each, equal parts being
/// solved once, and the dynamic program of rotor joins them (`join_by_chain`). That and nothing more: for minimum cuts, local
/// search and the like around it, there are the options of `hierarchical`, `improved` and `automatic`.
///
/// As published but for what it is made of: the parts are those of `find_partition`, also where values skip parts; the solver of
/// the parts is the strong form of Checkmate's program, for 6 * 3 bounds where the published default is 10 * 10; sizes are in
/// bytes.
///
/// A graph in which nothing can be cut is one part: it is solved by Inner where it is small enough, and `not_applicable`
/// otherwise. Copies to the host are not used.
///
/// @tparam Inner the solver of the parts, such as `checkmate<highs::backend>`
///
/// Complexity: `saved` * `peaks` calls of Inner per distinct part, plus that of `persistent_table`.
///
/// Reference: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
/// re-materialization in PyTorch", ICML 2023.
/// @code
/// using checkmate = remat::checkmate<remat::highs::backend>;
/// remat::rockmate method{checkmate(checkmate::options::fast())};
/// auto r = remat::solve(p, budget, method, {.seconds = 30});
/// @endcode
template <solver Inner = min_cut>
class rockmate : public hierarchical<Inner, join_by_chain> {
  using base = hierarchical<Inner, join_by_chain>;

 public:
  struct options {
    structure::partition_options cut = {.size = 12, .most = 48};  ///< how the graph is cut
    std::size_t saved = 6;                                        ///< bounds on what a part saves that are tried, >= 1
    std::size_t peaks = 3;                                        ///< bounds on a part's peak that are tried, >= 1
    std::size_t leaf_operations = 120;                            ///< parts of more operations are cut again
    std::size_t slots = 2000;                                     ///< of `persistent_table`, >= 1
  };

  rockmate() : rockmate(cheap_default<Inner>()) {}
  explicit rockmate(Inner inner) : rockmate(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  rockmate(Inner inner, const options& o) : base(std::move(inner), join_by_chain({.slots = o.slots}), base::options::plain(o)) {}

  std::string name() const { return "rockmate/" + std::string(this->inner().name()); }
};

}  // namespace remat
