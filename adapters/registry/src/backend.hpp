// SPDX-License-Identifier: Apache-2.0
/// @file
/// The MILP libraries of this build. Private to the registry.
#pragma once

#include <string>

#include <remat/milp/any_backend.hpp>

namespace remat::registry {

/// @param name highs, glpk, or auto for the first of them that is there
/// @throws not_available saying what to install
milp::any_backend make_backend(const std::string& name);

/// Whether a method may do without: only what is asked for by name must be there.
bool no_milp(const std::string& name);

}  // namespace remat::registry
