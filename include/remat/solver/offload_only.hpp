// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies to the host and no recomputation. Needs Boost.Graph.
#pragma once

#include <string>
#include <utility>

#include <remat/copies/copy_search.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/solver/prove_bound.hpp>

namespace remat {

/// Computes every needed operation once, in the order of the problem. Values that do not fit move to the host and back
/// (`copies::schedule_copies`). Finds a schedule for every budget that has one, on several tiers for nearly all. The status is
/// `not_applicable` for a problem that is `copies::why_unplannable`, and without copies unless store-all fits.
///
/// Complexity: that of `copies::schedule_copies` and `bound::copy_bound`.
/// @code
/// auto r = remat::solve(p, budget, remat::offload_only{});
/// @endcode
class offload_only {
 public:
  std::string name() const { return "offload_only"; }
  bool plans_tiers() const { return true; }

  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (p.plain()) {
      if (auto all = store_all_if_it_fits(p, budget)) return *std::move(all);
      if (!p.copies()) return refused(copies::no_copies);
    } else if (auto why = copies::why_unplannable(p); !why.empty()) {
      return refused(std::move(why));
    }
    result r;
    copies::copy_incumbent best(p, budget, m.stop_check());
    best.offer({needed_operations(p)});
    best.report(m, name(), 0);
    best.put_into(r);
    prove_bound(p, budget, r, m.stop_check());
    return r;
  }
};

}  // namespace remat
