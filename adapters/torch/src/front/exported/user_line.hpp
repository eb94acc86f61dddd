// SPDX-License-Identifier: Apache-2.0
/// @file
/// Finds the user's line for an operator in the stack trace that an export keeps.
#pragma once

#include <string>

namespace remat::pytorch::exported {

/// The last line of the user's own code in a Python stack trace; the first line if all code is from packages.
std::string line_of_user(const std::string& trace);

}  // namespace remat::pytorch::exported
