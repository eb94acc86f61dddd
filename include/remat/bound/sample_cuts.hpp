// SPDX-License-Identifier: Apache-2.0
/// @file
/// The moments of a step at which minimum cuts prove most. Needs Boost.Graph.
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

/// Makes cuts before the operations at which a schedule has to hold most. The operations at which store-all exceeds the budget
/// are divided into parts; each part gives the operation of its largest memory. The peak of store-all is added.
/// @param p      the problem
/// @param budget bytes
/// @param parts  number of parts, of equal size, >= 1; fewer above 10 000 operations, because each cut keeps a network
/// @param within as for `retention_cut`
/// @param stop   polled between the operations, where true ends the list, and by each `retention_cut`
/// @return at most `parts` + 1 cuts, the greatest demand first
/// Complexity: O(operations + parts * edges).
inline std::vector<std::unique_ptr<retention_cut>> sample_cuts(const problem& p, bytes_t budget, std::size_t parts,
                                                               const time_span* within = nullptr,
                                                               const std::function<bool()>& stop = {}) {
  const auto needed = needed_operations(p);
  const auto memory = measure_order(p, needed).memory;
  std::vector<std::size_t> all, over;  // positions in `needed`: in the span, over the budget
  for (std::size_t k = 0; k < needed.size(); ++k)
    if (!within || within->may_be_tau[needed[k]]) all.push_back(k);
  if (all.empty()) return {};
  std::copy_if(all.begin(), all.end(), std::back_inserter(over), [&](auto k) { return memory[k] > budget; });
  const auto peak = *std::max_element(all.begin(), all.end(), [&](auto a, auto b) { return memory[a] < memory[b]; });
  if (over.empty()) over.push_back(peak);
  std::vector<std::size_t> sample = {peak};
  parts = std::min({over.size(), parts, 1 + 4'000'000 / p.operations().size()});
  const auto part_begin = [&](std::size_t i) { return over.begin() + static_cast<std::ptrdiff_t>(i * over.size() / parts); };
  for (std::size_t i = 0; i < parts; ++i)
    sample.push_back(*std::max_element(part_begin(i), part_begin(i + 1), [&](auto a, auto b) { return memory[a] < memory[b]; }));
  std::sort(sample.begin(), sample.end());
  sample.erase(std::unique(sample.begin(), sample.end()), sample.end());
  std::vector<std::unique_ptr<retention_cut>> cuts;
  for (auto k : sample)
    if (!(stop && stop())) cuts.push_back(std::make_unique<retention_cut>(p, needed, needed[k], within, stop));
  std::stable_sort(cuts.begin(), cuts.end(), [](const auto& a, const auto& b) { return a->demand() > b->demand(); });
  return cuts;
}

/// Makes the cuts of `sample_cuts` with 3 `count` parts, and returns the `count` cuts of greatest demand.
/// Complexity: that of `sample_cuts`.
inline std::vector<std::unique_ptr<retention_cut>> most_demanding_cuts(const problem& p, bytes_t budget, std::size_t count,
                                                                       const std::function<bool()>& stop = {}) {
  auto cuts = sample_cuts(p, budget, 3 * count, nullptr, stop);
  while (cuts.size() > count) cuts.pop_back();
  return cuts;
}

}  // namespace remat::bound
