// SPDX-License-Identifier: Apache-2.0
/// @file
/// The line that a user finds his operator by, from the stack trace that an export keeps.
#pragma once

#include <string>

namespace remat::pytorch::exported {

/// The last line of the user's own code in a stack trace of Python.
std::string line_of_user(const std::string& trace);

}  // namespace remat::pytorch::exported
