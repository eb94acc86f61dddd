// SPDX-License-Identifier: Apache-2.0
/// @file
/// Joins parts by the hierarchical ILP. Needs Eigen.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <remat/hierarchy/hilp_model.hpp>
#include <remat/hierarchy/level.hpp>
#include <remat/milp/backend.hpp>

namespace remat {

/// The joiner of HiRemate: a MILP backend solves `hilp_model`. The parts need not be a chain.
///
/// @tparam B the MILP backend
///
/// Complexity: that of the backend, for O(nodes^2 (values + options)) columns.
/// @code
/// remat::hierarchical method{remat::min_cut{}, remat::join_by_hilp<remat::highs::backend>{}};
/// @endcode
template <milp::backend B>
class join_by_hilp {
 public:
  struct options {
    std::size_t choices = 4;  ///< largest number of options of a part, >= 1
  };

  join_by_hilp() : join_by_hilp(options{}) {}
  /// @throws bad_option naming the member that is out of range
  explicit join_by_hilp(const options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {
    if (o.choices < 1) throw bad_option("join_by_hilp.choices must be >= 1, got 0");
  }

  std::string name() const { return "hilp/" + std::string(backend_.name()); }

  /// @throws any exception of the backend
  void join(hierarchy::level& l, monitor& m) const {
    hierarchy::hilp_model form(l, options_.choices);
    if (form.nodes() == 0 || form.nodes() > max_nodes || m.stopped()) return;
    const auto program = form.build();
    auto o = milp::options_within(m);
    o.cutoff = l.seconds() / form.unit();
    o.poll = [&](double, double) { return m.stopped(); };
    const auto s = milp::solve(backend_, program, o);
    if (s.found()) l.offer(form.order(s.x));
  }

 private:
  static constexpr std::size_t max_nodes = 100;  // halves of parts, and single operations; larger levels are not joined
  options options_;
  B backend_;
};

}  // namespace remat
