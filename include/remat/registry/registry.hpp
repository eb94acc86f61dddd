// SPDX-License-Identifier: Apache-2.0
/// @file
/// The solvers and MILP libraries by name, compiled once: for programs that choose at run time, and for those that would rather
/// link a solver than compile it. To be linked with `remat_registry`.
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
  std::string standard;  ///< its value where none is given
  std::string range;     ///< what it may be, such as `an integer from 1 to 100`
  std::string summary;
};

class option_reader;

/// A solver by name.
struct method {
  std::string_view name;
  std::string_view summary;
  any_solver (*maker)(const std::string& backend, option_reader& options);  ///< for `make` and `options`

  /// Makes the solver.
  /// @param backend the MILP library: highs, glpk, or auto for the first that is there. A method that needs none, or can do
  ///                without, takes `auto` for that; a library that is asked for by name is never replaced.
  /// @param given   options that differ from their defaults; the name of the solver tells them
  /// Complexity: O(options).
  /// @throws bad_option naming an option that the solver does not have, or whose value is out of range
  /// @throws not_available saying what to install
  /// @code
  /// const auto solver = remat::registry::find("rockmate").make("auto", {{"cut.size", "6"}, {"saved", "2"}});
  /// @endcode
  any_solver make(const std::string& backend, const option_values& given = {}) const;

  /// The options that the solver has.
  std::vector<option> options() const;
};

/// All solvers, the default one first.
std::span<const method> methods();

/// @throws bad_option naming what is there
/// @code
/// const auto solver = remat::registry::find("rockmate").make("auto");
/// @endcode
const method& find(std::string_view name);

/// Options as one text, such as `cut.size=6, saved=2`: equal for equal options.
std::string to_string(const option_values& given);

/// A MILP library, and whether this build can use it on this machine.
struct backend_state {
  std::string name;
  bool available;
  std::string what;  ///< version and where it is, or why it is not there
};

/// All MILP libraries that there are adapters for, in the order in which `auto` tries them.
std::vector<backend_state> backends();

}  // namespace remat::registry
