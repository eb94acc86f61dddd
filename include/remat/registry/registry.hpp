// SPDX-License-Identifier: Apache-2.0
/// @file
/// The solvers and MILP libraries by name, compiled once: for programs that choose at run time, and for those that would rather
/// link a solver than compile it. To be linked with `remat_registry`.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <remat/core/any_solver.hpp>

namespace remat::registry {

/// A solver by name.
struct method {
  std::string_view name;
  std::string_view summary;
  /// Makes it, with the MILP library named: highs, glpk, or auto for the first that is there. A method that needs none, or can do
  /// without, takes `auto` for that; a library that is asked for by name is never replaced.
  /// @throws not_available saying what to install
  any_solver (*make)(const std::string& backend);
};

/// All solvers, the default one first.
std::span<const method> methods();

/// @throws bad_option naming what is there
/// @code
/// const auto solver = remat::registry::find("rockmate").make("auto");
/// @endcode
const method& find(std::string_view name);

/// A MILP library, and whether this build can use it on this machine.
struct backend_state {
  std::string name;
  bool available;
  std::string what;  ///< version and where it is, or why it is not there
};

/// All MILP libraries that there are adapters for, in the order in which `auto` tries them.
std::vector<backend_state> backends();

}  // namespace remat::registry
