// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where the system tells of its memory. Private to the adapter.
#pragma once

#include <string>

namespace remat::pytorch {

/// The folder that has `proc` and `sys`; tests put another in its place.
std::string& root_of_system();

}  // namespace remat::pytorch
