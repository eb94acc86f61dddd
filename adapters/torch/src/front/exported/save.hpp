// SPDX-License-Identifier: Apache-2.0
/// @file
/// Saves weights into an archive.
#pragma once

#include <string>

#include "archive.hpp"

namespace remat::pytorch::exported {

/// Copies the archive, with the current content of its tensors.
void save(const std::string& path, const archive& from);

}  // namespace remat::pytorch::exported
