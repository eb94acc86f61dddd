// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the methods that need a MILP library must do with any of them; each adapter's tests call this.
#pragma once

#include <cstddef>
#include <cstdint>

#include <remat/milp/any_backend.hpp>

namespace remat::testing {

// Checkmate.

/// `count` random problems: checkmate is optimal among staged schedules, and never better than any schedule.
void check_against_oracles(const milp::any_backend& library, std::uint64_t seed, int count, unsigned extra_stages = 0,
                           bool last_stage = false);
/// The unit chain has a closed form: n + 1 + t(n + 1, B - 2), t(l, s) = r l - C(s + r, s + 1), r least with C(s + r, s) >= l.
void check_unit_chains(const milp::any_backend& library);
/// All topologies of `n` operations of one output each that the last one depends on, with random costs and sizes.
void check_all_topologies(const milp::any_backend& library, std::size_t n);
/// One byte and one second per operation: a pyramid needs its base and one more byte, and then no recomputation.
void check_pebbles(const milp::any_backend& library);
/// `count` random problems: no restriction gives a better schedule, R1 equals operations marked once-only, and what is no
/// restriction changes nothing.
void check_restrictions(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems: the published form has the same optimum, and the same solutions.
void check_published_form(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems, each for all budgets: a sweep is as good as single calls, and the staircase has every step.
void check_sweep(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems: what `checkmate_rounding` finds is a schedule, and its bound is one.
void check_rounding(const milp::any_backend& library, std::uint64_t seed, int count);
/// `checkmate` and `checkmate_rounding`, as any other solver.
void check_conformance(const milp::any_backend& library, std::size_t rounds);
/// Edges of the interface.
void check_edges(const milp::any_backend& library);

// Poet.

/// `count` random problems: the bound of the scope is below all of its schedules, no schedule is below the optimum, and nothing
/// false is claimed.
void check_poet_against_oracles(const milp::any_backend& library, std::uint64_t seed, int count);

// Bounds and schedules from moments.

/// `count` random problems: no bound of any model is above the optimum, and none of a single moment is below its minimum cut.
void check_moment_forms(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems: no model of the order in which a fastest schedule has its first runs, and no search, is above it.
void check_moment_orders(const milp::any_backend& library, std::uint64_t seed, int count);
/// The optimum of a step is proven that no model of operations on a path bounds as well.
void check_order_of_moments(const milp::any_backend& library);
/// As `check_moment_forms` with copies: no bound of any model is above the optimum.
void check_moment_forms_with_copies(const milp::any_backend& library, std::uint64_t seed, int count);
/// A search that ends earlier, with another limit, solves the first models of a longer one, so its bound is not above that.
void check_multi_cut_limits(const milp::any_backend& library);
/// The solver, as any other, and where moments are enough to prove the optimum.
void check_moments(const milp::any_backend& library);

// The hierarchical ILP and hiremate.

/// Where all parts are single operations, the optimum is that of staged schedules.
void check_hilp_of_operations(const milp::any_backend& library, std::uint64_t seed, int rounds);
/// Two levels: never faster than the optimum; never slower than the best staged schedule of any selection of options, each part
/// in one option throughout.
void check_hilp_of_parts(const milp::any_backend& library, std::uint64_t seed, int rounds);
/// The joiner and the method built on it, on problems with parts of parts.
void check_hiremate(const milp::any_backend& library);

}  // namespace remat::testing
