// SPDX-License-Identifier: Apache-2.0
/// @file
/// The default solver, compiled apart from PyTorch. Private to the adapter.
#pragma once

#include <functional>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>

namespace remat::pytorch {

result solve_by_default(const problem& p, bytes_t budget, const limits& l, const std::function<control(const progress&)>& watch);

}  // namespace remat::pytorch
