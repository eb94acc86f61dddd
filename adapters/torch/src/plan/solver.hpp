// SPDX-License-Identifier: Apache-2.0
/// @file
/// The default solver and a search from a known schedule, compiled apart from PyTorch. Private to the adapter.
#pragma once

#include <functional>
#include <optional>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>

namespace remat::pytorch {

result solve_by_default(const problem& p, bytes_t budget, const limits& l, const std::function<control(const progress&)>& watch);

/// A schedule within the budget, from one that needs little more: by recomputation alone.
/// @param start valid for `p`, without copies
/// @param stop  polled now and then; true gives up
/// @return nothing if none is found
std::optional<schedule> lower_peak_of(const problem& p, const schedule& start, bytes_t budget, const std::function<bool()>& stop);

}  // namespace remat::pytorch
