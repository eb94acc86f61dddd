// SPDX-License-Identifier: Apache-2.0
/// @file
/// The MILP libraries of this build. Private to the registry.
#pragma once

#include <string>

#include <remat/milp/any_backend.hpp>

namespace remat::registry {

/// Makes a MILP backend.
/// @param name highs, glpk, or auto for the first that is available
/// @throws not_available saying which library to install
milp::any_backend make_backend(const std::string& name);

/// True if a method has to do without a MILP library: `name` is auto, and none is available.
bool without_milp(const std::string& name);

}  // namespace remat::registry
