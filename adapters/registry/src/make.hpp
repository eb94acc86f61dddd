// SPDX-License-Identifier: Apache-2.0
/// @file
/// Makers of the solvers, each in a file of its own, so that a change of one compiles that one. Private to the registry.
#pragma once

#include <string>

#include <remat/core/any_solver.hpp>

namespace remat::registry {

any_solver make_automatic(const std::string& backend);
any_solver make_checkmate(const std::string& backend);
any_solver make_checkmate_balanced(const std::string& backend);
any_solver make_checkmate_fast(const std::string& backend);
any_solver make_checkmate_published(const std::string& backend);
any_solver make_checkmate_repaired(const std::string& backend);
any_solver make_checkmate_rounding(const std::string& backend);
any_solver make_chen(const std::string& backend);
any_solver make_hiremate(const std::string& backend);
any_solver make_improved(const std::string& backend);
any_solver make_min_cut(const std::string& backend);
any_solver make_moments(const std::string& backend);
any_solver make_offload_only(const std::string& backend);
any_solver make_offmate(const std::string& backend);
any_solver make_poet(const std::string& backend);
any_solver make_pofo(const std::string& backend);
any_solver make_recompute_all_blocks(const std::string& backend);
any_solver make_revolve(const std::string& backend);
any_solver make_rockmate(const std::string& backend);
any_solver make_rotor(const std::string& backend);
any_solver make_store_all(const std::string& backend);
any_solver make_twremat(const std::string& backend);

}  // namespace remat::registry
