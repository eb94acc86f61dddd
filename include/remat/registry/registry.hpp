// SPDX-License-Identifier: Apache-2.0
/// @file
/// The solvers and MILP libraries by name, compiled once. For programs that choose a solver at run time, or that link solvers
/// instead of compiling them. Link with `remat_registry`.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <remat/core/any_solver.hpp>

namespace remat::registry {

/// Values of a solver's options by name, as text: a number, `true` or `false`.
using option_values = std::map<std::string, std::string>;

/// An option of a named solver.
struct option {
  std::string name;      ///< the member of the solver's `options`, such as `saved` or `cut.size`
  std::string standard;  ///< its default
  std::string range;     ///< the values allowed, such as `an integer from 1 to 100`
  std::string summary;
};

class option_reader;

/// A named solver.
struct method {
  std::string_view name;
  std::string_view summary;
  any_solver (*maker)(const std::string& backend, option_reader& options);  ///< called by `make` and `options`

  /// Makes the solver.
  /// @param backend the MILP library: highs, glpk, or auto for the first that is available. With auto, a method that needs no
  ///                library, or can do without, also works if there is none. A library that is asked for by name is never
  ///                replaced.
  /// @param given   options that differ from their defaults; they appear in the name of the solver
  /// Complexity: O(options).
  /// @throws bad_option naming an option that the solver does not have, or whose value is out of range
  /// @throws not_available saying which library to install
  /// @code
  /// const auto solver = remat::registry::find("rockmate").make("auto", {{"cut.size", "6"}, {"saved", "2"}});
  /// @endcode
  any_solver make(const std::string& backend, const option_values& given = {}) const;

  /// The options of the solver, with defaults and ranges.
  std::vector<option> options() const;
};

/// All solvers, the default one first.
std::span<const method> methods();

/// The solver with a name.
/// @throws bad_option listing the names of all solvers
/// @code
/// const auto solver = remat::registry::find("rockmate").make("auto");
/// @endcode
const method& find(std::string_view name);

/// Options as one text, such as `cut.size=6, saved=2`. Equal options give equal texts.
std::string to_string(const option_values& given);

/// A MILP library, and whether this build can use it on this machine.
struct backend_state {
  std::string name;
  bool available;
  std::string what;  ///< version and path, or why it is not available
};

/// All MILP libraries with an adapter, in the order in which `auto` tries them.
std::vector<backend_state> backends();

}  // namespace remat::registry
