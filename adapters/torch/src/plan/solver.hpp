// SPDX-License-Identifier: Apache-2.0
/// @file
/// The default solver and a local search from a given schedule, compiled apart from PyTorch. Private to the adapter.
#pragma once

#include <functional>
#include <optional>

#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>

namespace remat::pytorch {

result solve_by_default(const problem& p, bytes_t budget, const limits& l, const std::function<control(const progress&)>& watch);

/// Lowers the peak of a schedule that slightly exceeds the budget, by recomputation only.
/// @param start valid for `p`, without copies
/// @param stop  polled during the search; true ends it
/// @return a schedule within the budget, or nothing
std::optional<schedule> lower_peak_of(const problem& p, const schedule& start, bytes_t budget, const std::function<bool()>& stop);

}  // namespace remat::pytorch
