// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where in a step minimum cuts tell most. Needs Boost.Graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include <remat/bound/retention_cut.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>

namespace remat::bound {

/// The operations before which a schedule has to hold most, one for each part of a step in which store-all exceeds the budget,
/// and the peak; the greatest demand first. Complexity: O(operations + parts * edges).
/// @param parts  as many operations each, >= 1; less where there are more than 10 000 operations, as each keeps a network
/// @param within as for `retention_cut`
/// @param stop   polled between the operations, true ends the list; and by each `retention_cut`
inline std::vector<std::unique_ptr<retention_cut>> cuts_throughout(const problem& p, bytes_t budget, std::size_t parts,
                                                                   const step_span* within = nullptr,
                                                                   const std::function<bool()>& stop = {}) {
  const auto needed = needed_operations(p);
  const auto memory = measure_order(p, needed).memory;
  std::vector<std::size_t> all, over;  // positions; those where store-all exceeds the budget, or its peak
  for (std::size_t k = 0; k < needed.size(); ++k)
    if (!within || within->moments[needed[k]]) all.push_back(k);
  if (all.empty()) return {};
  std::copy_if(all.begin(), all.end(), std::back_inserter(over), [&](auto k) { return memory[k] > budget; });
  const auto peak = *std::max_element(all.begin(), all.end(), [&](auto a, auto b) { return memory[a] < memory[b]; });
  if (over.empty()) over.push_back(peak);
  std::vector<std::size_t> sample = {peak};
  parts = std::min({over.size(), parts, 1 + 4'000'000 / p.operations().size()});
  const auto at = [&](std::size_t i) { return over.begin() + static_cast<std::ptrdiff_t>(i * over.size() / parts); };
  for (std::size_t i = 0; i < parts; ++i)
    sample.push_back(*std::max_element(at(i), at(i + 1), [&](auto a, auto b) { return memory[a] < memory[b]; }));
  std::sort(sample.begin(), sample.end());
  sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
  std::vector<std::unique_ptr<retention_cut>> cuts;
  for (auto k : sample)
    if (!(stop && stop())) cuts.push_back(std::make_unique<retention_cut>(p, needed, needed[k], within, stop));
  std::stable_sort(cuts.begin(), cuts.end(), [](const auto& a, const auto& b) { return a->demand() > b->demand(); });
  return cuts;
}

/// Those of `count` operations before which a schedule has to hold much: candidates for `retention_cut`. Complexity: that of
/// `cuts_throughout` with 3 `count` parts.
inline std::vector<std::unique_ptr<retention_cut>> retention_cuts(const problem& p, bytes_t budget, std::size_t count,
                                                                  const std::function<bool()>& stop = {}) {
  auto cuts = cuts_throughout(p, budget, 3 * count, nullptr, stop);
  while (cuts.size() > count) cuts.pop_back();
  return cuts;
}

}  // namespace remat::bound
