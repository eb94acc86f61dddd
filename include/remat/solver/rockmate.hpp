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

/// Rockmate: cuts the graph into a chain of parts, asks another solver for several options of each part, and joins them by the
/// dynamic program of rotor (`join_by_chain`). Equal parts are solved once. Minimum cuts and local search take no part; they are
/// options of `hierarchical`, `improved` and `automatic`.
///
/// Differences from the published method: the parts are those of `find_partition`, even where values skip parts; with `checkmate`
/// as Inner, the strong form of its program solves the parts, for 6 * 3 bounds (published default: 10 * 10); sizes are in bytes.
///
/// A graph that cannot be cut is one part: Inner solves it if it is small enough, and the status is `not_applicable` otherwise.
/// Does not use copies to the host.
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
    std::size_t saved = 6;              ///< number of bounds to try on the bytes that a part saves, >= 1
    std::size_t peaks = 3;              ///< number of bounds to try on the peak of a part, >= 1
    std::size_t leaf_operations = 120;  ///< parts of more operations are cut again
    std::size_t slots = 2000;           ///< most units of memory of `persistent_table`, >= 1
  };

  rockmate() : rockmate(cheap_default<Inner>()) {}
  explicit rockmate(Inner inner) : rockmate(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  rockmate(Inner inner, const options& o) : base(std::move(inner), join_by_chain({.slots = o.slots}), base::options::plain(o)) {}

  std::string name() const { return "rockmate/" + std::string(this->inner().name()); }
};

}  // namespace remat
