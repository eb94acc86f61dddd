// SPDX-License-Identifier: Apache-2.0
/// @file
/// Checks of the methods that need a MILP library, for any library. The tests of each adapter call them.
#pragma once

#include <cstddef>
#include <cstdint>

#include <remat/milp/any_backend.hpp>

namespace remat::testing {

// Checkmate.

/// `count` random problems: checkmate is optimal among staged schedules, and never faster than the optimum of all schedules.
void check_against_oracles(const milp::any_backend& library, std::uint64_t seed, int count, unsigned extra_stages = 0,
                           bool last_stage = false);
/// The unit chain has a closed form: n + 1 + t(n + 1, B - 2), t(l, s) = r l - C(s + r, s + 1), r least with C(s + r, s) >= l.
void check_unit_chains(const milp::any_backend& library);
/// All graphs of `n` operations with one output each, of which only the last one has no reader; random costs and sizes.
void check_all_topologies(const milp::any_backend& library, std::size_t n);
/// Pebbling: one byte and one second per operation. A pyramid fits its base and one more byte, without recomputation; no less.
void check_pebbles(const milp::any_backend& library);
/// `count` random problems: no restriction gives a faster schedule, R1 equals marking operations once-only, and restrictions that
/// exclude nothing change nothing.
void check_restrictions(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems: the published form has the same optimum and the same solutions.
void check_published_form(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems, each at all budgets: a sweep is as good as single calls, and the staircase has every step.
void check_sweep(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems: `checkmate_rounding` returns valid schedules and valid bounds.
void check_rounding(const milp::any_backend& library, std::uint64_t seed, int count);
/// `checkmate` and `checkmate_rounding` pass the conformance suite of solvers.
void check_conformance(const milp::any_backend& library, std::size_t rounds);
/// Edges of the interface: empty problems, start schedules, options out of range, limits.
void check_edges(const milp::any_backend& library);

// Poet.

/// `count` random problems: the bound of the scope is not above any schedule of the scope, no schedule beats the optimum, and no
/// status is claimed without proof.
void check_poet_against_oracles(const milp::any_backend& library, std::uint64_t seed, int count);

// Bounds and schedules from moments.

/// `count` random problems: no bound of any model is above the optimum, and no bound from a single moment is below its minimum
/// cut.
void check_moment_forms(const milp::any_backend& library, std::uint64_t seed, int count);
/// `count` random problems: neither the model of moments in the order of a fastest schedule nor the search over orders exceeds
/// the optimum.
void check_moment_orders(const milp::any_backend& library, std::uint64_t seed, int count);
/// `multi_cut_bound` proves the optimum of a step for which the model with its operations on one path is weaker.
void check_order_of_moments(const milp::any_backend& library);
/// As `check_moment_forms` with copies: no bound of any model is above the optimum.
void check_moment_forms_with_copies(const milp::any_backend& library, std::uint64_t seed, int count);
/// A search with a shorter limit solves the first models of the longer search, so the bound of the longer one is not weaker.
void check_multi_cut_limits(const milp::any_backend& library);
/// The solver passes the conformance suite, and proves optima where moments suffice.
void check_moments(const milp::any_backend& library);

// The hierarchical ILP and hiremate.

/// If all parts are single operations, the ILP finds the staged optimum.
void check_hilp_of_operations(const milp::any_backend& library, std::uint64_t seed, int rounds);
/// Two levels: the ILP is never faster than the optimum, and never slower than the best staged schedule of any selection of
/// options in which each part keeps one option throughout.
void check_hilp_of_parts(const milp::any_backend& library, std::uint64_t seed, int rounds);
/// The joiner and the method built on it, on problems with nested parts.
void check_hiremate(const milp::any_backend& library);

}  // namespace remat::testing
