// SPDX-License-Identifier: Apache-2.0
/// @file
/// Problems with slower links, for plans with slack.
#pragma once

#include <string>
#include <utility>

#include <remat/core/error.hpp>
#include <remat/core/problem.hpp>

namespace remat {

/// The same problem with each link at a share of its rate. If a real link is slower than its rate, a plan that keeps this link
/// always busy becomes much slower. A plan for lower rates has slack. Its schedule `s` is valid for `p`, too; `evaluate(p, s)`
/// gives its time there.
/// @param p     the problem
/// @param share fraction of every rate, in (0, 1]
/// @throws bad_option for a share out of range
/// Complexity: O(V + edges).
/// @code
/// const auto plan = remat::solve(remat::with_slower_links(p, 0.9), budget, remat::offmate{});
/// const auto takes = remat::evaluate(p, plan.schedule).seconds;
/// @endcode
inline problem with_slower_links(const problem& p, double share) {
  if (!(share > 0 && share <= 1)) throw bad_option("with_slower_links.share must be in (0, 1], got " + std::to_string(share));
  auto x = p.members();
  if (x.copies) x.copies->to_host *= share, x.copies->to_device *= share;
  for (auto& l : x.system.links) l.rate *= share;
  return problem(std::move(x));
}

}  // namespace remat
