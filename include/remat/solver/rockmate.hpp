// SPDX-License-Identifier: Apache-2.0
/// @file
/// Two-level rematerialization: parts by any solver, their chain by dynamic programming. Needs Boost.Graph.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/hierarchical.hpp>

namespace remat {

/// `hierarchical` as in Rockmate: the graph is cut into a chain of parts, another solver is asked for several ways to run each
/// part, equal ones once, and the dynamic program of `persistent_table` joins them. The schedules of `min_cut` compete; the
/// fastest that fits wins. Copies to the host are not used.
///
/// @tparam Inner the solver of the parts, such as `checkmate<highs::backend>`
///
/// Complexity: that of `min_cut`, plus `saved` * `peaks` calls of Inner per distinct part, plus that of `persistent_table`.
///
/// Reference: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate: an efficient, fast, automatic and generic tool for
/// re-materialization in PyTorch", ICML 2023.
/// @code
/// using checkmate = remat::checkmate<remat::highs::backend>;
/// remat::rockmate method{checkmate(checkmate::options::fast())};
/// auto r = remat::solve(p, budget, method, {.seconds = 30});
/// @endcode
template <solver Inner = min_cut>
class rockmate {
 public:
  struct options {
    partition_options cut = {.size = 12, .most = 48};  ///< how the graph is cut
    std::size_t saved = 6;                             ///< bounds on what a part saves that are tried, >= 1
    std::size_t peaks = 3;                             ///< bounds on a part's peak that are tried, >= 1
    std::size_t inner_operations = 120;                ///< parts of more operations are cut again
    std::size_t slots = 2000;                          ///< of `persistent_table`, >= 1
  };

  rockmate() : rockmate(hierarchical<Inner>::template light<Inner>()) {}
  explicit rockmate(Inner inner) : rockmate(std::move(inner), options{}) {}
  /// @throws bad_option naming the member that is out of range
  rockmate(Inner inner, const options& o)
      : name_("rockmate/" + std::string(inner.name())),
        method_(std::move(inner), hierarchical<Inner>::template light<min_cut>(),
                {.cut = o.cut,
                 .leaf_operations = o.inner_operations,
                 .saved = o.saved,
                 .peaks = o.peaks,
                 .condensed = false,
                 .slots = o.slots,
                 .compete = true}) {}

  std::string name() const { return name_; }

  /// @throws bad_option if the options of the cut are out of range; what Inner throws
  result solve(const problem& p, bytes_t budget, monitor& m) const { return method_.solve(p, budget, m); }

 private:
  std::string name_;
  hierarchical<Inner> method_;
};

}  // namespace remat
