// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where the system reports its memory. Private to the adapter.
#pragma once

#include <string>

namespace remat::pytorch {

/// The folder that contains `proc` and `sys`; tests replace it.
std::string& root_of_system();

}  // namespace remat::pytorch
