// SPDX-License-Identifier: Apache-2.0
/// @file
/// The solvers and MILP libraries of the command-line program, by name. The Python package and the benches offer the same.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "any_solver.hpp"

namespace cli {

/// A solver by name.
struct method {
  std::string_view name;
  std::string_view summary;
  /// Makes it, with the MILP library named: highs, glpk, or auto for the first that is there.
  /// @throws remat::not_available saying what to install
  any_solver (*make)(const std::string& backend);
};

/// All solvers, the default one first.
std::span<const method> methods();

/// @throws remat::bad_option naming what is there
const method& find_method(std::string_view name);

/// A MILP library, and whether this build can use it on this machine.
struct backend_state {
  std::string name;
  bool available;
  std::string what;  ///< where it is, or why it is not there
};

/// All MILP libraries that there are adapters for, in the order in which `auto` tries them.
std::vector<backend_state> backends();

}  // namespace cli
