// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makers of the solvers. Each has a source file of its own, so that a change of one solver compiles one file. Private to the
/// registry.
#pragma once

#include <cstddef>
#include <string>

#include <remat/core/any_solver.hpp>

#include "option_reader.hpp"

namespace remat::registry {

inline constexpr std::size_t most_operations = 1'000'000;
inline constexpr std::size_t most_rounds = 1'000'000'000;
inline constexpr std::size_t most_slots = 10'000;  ///< of a table, whose size also grows with the squared length of the chain

/// Reads the options that all methods with parts have in common.
template <class Options>
void read_parts(Options& o, option_reader& read) {
  read("cut.size", o.cut.size, 1, most_operations, "operations that a part should have");
  read("cut.most", o.cut.most, 1, 10'000, "most parts");
  read("leaf_operations", o.leaf_operations, 1, most_operations, "parts of more operations are cut again");
  read("saved", o.saved, 1, 100, "bounds that are tried on what a part saves");
  read("peaks", o.peaks, 1, 100, "bounds that are tried on the peak of a part");
}

/// The solver for the parts of `hiremate` and `rockmate`.
any_solver solver_of_parts(const std::string& backend);

any_solver make_automatic(const std::string& backend, option_reader& read);
any_solver make_checkmate(const std::string& backend, option_reader& read);
any_solver make_checkmate_balanced(const std::string& backend, option_reader& read);
any_solver make_checkmate_fast(const std::string& backend, option_reader& read);
any_solver make_checkmate_published(const std::string& backend, option_reader& read);
any_solver make_checkmate_repaired(const std::string& backend, option_reader& read);
any_solver make_checkmate_rounding(const std::string& backend, option_reader& read);
any_solver make_chen(const std::string& backend, option_reader& read);
any_solver make_hiremate(const std::string& backend, option_reader& read);
any_solver make_improved(const std::string& backend, option_reader& read);
any_solver make_min_cut(const std::string& backend, option_reader& read);
any_solver make_moments(const std::string& backend, option_reader& read);
any_solver make_offload_only(const std::string& backend, option_reader& read);
any_solver make_offmate(const std::string& backend, option_reader& read);
any_solver make_poet(const std::string& backend, option_reader& read);
any_solver make_pofo(const std::string& backend, option_reader& read);
any_solver make_recompute_all_blocks(const std::string& backend, option_reader& read);
any_solver make_revolve(const std::string& backend, option_reader& read);
any_solver make_rockmate(const std::string& backend, option_reader& read);
any_solver make_rotor(const std::string& backend, option_reader& read);
any_solver make_store_all(const std::string& backend, option_reader& read);
any_solver make_twremat(const std::string& backend, option_reader& read);

}  // namespace remat::registry
