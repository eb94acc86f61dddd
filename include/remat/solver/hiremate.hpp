// SPDX-License-Identifier: Apache-2.0
/// @file
/// Rematerialization in parts of parts, of graphs of any shape. Needs Boost.Graph.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/solver/hierarchical.hpp>

namespace remat {

/// `hierarchical` as in HiRemate: parts of parts down to some dozens of operations, solved by Inner; above, Outer plans the graph
/// of the parts, which need not be a chain. The schedules of `min_cut` compete; the fastest that fits wins. Copies to the host
/// are not used.
///
/// @tparam Inner the solver of the smallest parts, such as `checkmate<highs::backend>`
/// @tparam Outer the solver of the graph of parts
///
/// Complexity: that of `min_cut`, plus that of `hierarchical`.
///
/// Reference: Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois, Beaumont, "HiRemate: Hierarchical Approach for Efficient
/// Re-materialization of Neural Networks", 2024.
/// @code
/// using checkmate = remat::checkmate<remat::highs::backend>;
/// auto r = remat::solve(p, budget, remat::hiremate{checkmate(checkmate::options::fast())}, {.seconds = 60});
/// @endcode
template <solver Inner = min_cut, solver Outer = min_cut>
class hiremate {
 public:
  struct options {
    partition_options cut = {.most = 32};  ///< how graphs are cut, at every level
    std::size_t leaf_operations = 80;      ///< parts of more operations are cut again
    std::size_t saved = 6;                 ///< bounds on what a part saves that are tried, >= 1
    std::size_t peaks = 3;                 ///< bounds on a part's peak that are tried, >= 1
  };

  hiremate() : hiremate(hierarchical<Inner, Outer>::template light<Inner>()) {}
  explicit hiremate(Inner inner, Outer outer = hierarchical<Inner, Outer>::template light<Outer>())
      : hiremate(std::move(inner), std::move(outer), options{}) {}
  /// @throws bad_option naming the member that is out of range
  hiremate(Inner inner, Outer outer, const options& o)
      : name_("hiremate/" + std::string(inner.name()) + "/" + std::string(outer.name())),
        method_(std::move(inner), std::move(outer),
                {.cut = o.cut,
                 .leaf_operations = o.leaf_operations,
                 .saved = o.saved,
                 .peaks = o.peaks,
                 .chain = false,
                 .compete = true}) {}

  std::string name() const { return name_; }

  /// @throws bad_option if the options of the cut are out of range; what Inner and Outer throw
  result solve(const problem& p, bytes_t budget, monitor& m) const { return method_.solve(p, budget, m); }

 private:
  std::string name_;
  hierarchical<Inner, Outer> method_;
};

}  // namespace remat
