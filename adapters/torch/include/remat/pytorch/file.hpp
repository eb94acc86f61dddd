// SPDX-License-Identifier: Apache-2.0
/// @file
/// Files for what does not fit in memory.
#pragma once

#include <string>

namespace remat::pytorch {

/// Opens a file in `folder` that has no name, is readable by nobody else, and is gone when it is closed, however the process
/// ends.
/// @param direct  copies should pass the system's cache by; they do not where the file system has no such way
/// @return its descriptor, closed by `exec`; the caller closes it
/// @throws bad_option naming the folder and the system's reason; out_of_memory if the disk is full
int open_nameless_file(const std::string& folder, bool direct = false);

}  // namespace remat::pytorch
