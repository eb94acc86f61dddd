// SPDX-License-Identifier: Apache-2.0
/// @file
/// Seconds. Private to the adapter.
#pragma once

#include <chrono>

namespace remat::torch {

using clock = std::chrono::steady_clock;

inline double since(clock::time_point t) { return std::chrono::duration<double>(clock::now() - t).count(); }

}  // namespace remat::torch
