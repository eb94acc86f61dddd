// SPDX-License-Identifier: Apache-2.0
/// @file
/// Weights back into an archive.
#pragma once

#include <string>

#include "archive.hpp"

namespace remat::pytorch::exported {

/// Copies the archive with its tensors as they are now.
void save(const std::string& path, const archive& from);

}  // namespace remat::pytorch::exported
