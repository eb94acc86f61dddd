// SPDX-License-Identifier: Apache-2.0
/// @file
/// Reads options for makers of solvers. Private to the registry.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <remat/registry/registry.hpp>

namespace remat::registry {

/// Copies the options that a caller gives into the `options` of a solver. A maker names all options of its solver:
/// @code
/// any_solver make_twremat(const std::string&, option_reader& read) {
///   twremat::options o;
///   read("shrink", o.shrink, 1.01, 100, "ratio of the sizes of undivided parts");
///   return twremat(o);
/// }
/// @endcode
class option_reader {
 public:
  /// @param solver the name of the solver, for messages
  option_reader(std::string_view solver, const option_values& given) : solver_(solver), given_(given) {}

  /// Reads an option with a range. `value` holds the default, and receives the value given, if any.
  /// @throws bad_option naming the option if the text is no number in [least, most]
  void operator()(const std::string& name, std::size_t& value, std::size_t least, std::size_t most, const std::string& summary);
  void operator()(const std::string& name, double& value, double least, double most, const std::string& summary);
  /// Reads an option that is true or false.
  /// @throws bad_option naming the option if the text is neither true nor false
  void operator()(const std::string& name, bool& value, const std::string& summary);

  /// The options that the maker has named so far.
  const std::vector<option>& known() const { return known_; }
  /// @throws bad_option naming an option that was given but that the maker has not named
  void refuse_unknown() const;

 private:
  template <class T, class Parse>
  void read(option o, T& value, Parse parse);

  std::string_view solver_;
  const option_values& given_;
  std::vector<option> known_;
};

}  // namespace remat::registry
