// SPDX-License-Identifier: Apache-2.0
/// @file
/// The data of a report on a plan, and the searches for it. Needs nlohmann/json.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/pareto_curve.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/io/plan_document.hpp>
#include <remat/io/problem_document.hpp>

namespace remat {

/// A plan, and the results that a report compares it with.
struct plan_report {
  remat::problem problem;
  operation_labels labels;
  remat::result plan;          ///< the plan, with peak, time and recomputations as `evaluate` finds them
  store_all_needs store_all;   ///< needs of the step without a budget
  std::vector<result> curve;   ///< time against budget, one result per budget
  bytes_t more_bytes = 0;      ///< additional bytes of the budget of `more`
  std::optional<result> more;  ///< a plan with a larger budget; nothing if this plan takes no extra time
};

/// Bytes by which a report enlarges the budget: 1 GiB. For small problems, a power of two that is about an eighth of what
/// store-all needs beyond held sources.
inline bytes_t report_step(const problem& p, const store_all_needs& needs) {
  const auto eighth = static_cast<std::uint64_t>(std::max<bytes_t>(8, needs.peak - p.held_bytes())) / 8;
  return static_cast<bytes_t>(std::min(std::uint64_t{1} << 30, std::bit_floor(eighth)));
}

/// Compares a plan with other budgets.
/// @param d         the plan with its problem
/// @param s         the method that plans for other budgets
/// @param l         limits of all searches together
/// @param points    number of points of the curve, >= 1
/// @param observers as for `solve`
/// @return the plan as evaluated, the curve, and a plan for a larger budget
/// @throws bad_schedule if the plan has no steps or is not valid; any exception of the searches
/// Complexity: that of the searches.
/// @code
/// const auto d = remat::read_plan("plan.json");
/// remat::write_file("report.html", remat::html_report(remat::compare_plan(d, remat::min_cut{}, {.seconds = 10})));
/// @endcode
template <solver S, observer... O>
plan_report compare_plan(const plan_document& d, const S& s, const limits& l = {}, std::size_t points = 12, O&&... observers) {
  const auto& p = d.problem.problem;
  plan_report r{p, labels_of(d.problem), d.result, measure_store_all(p), {}, 0, std::nullopt};
  if (r.plan.schedule.steps.empty()) throw bad_schedule(0, "the plan has no steps: nothing was found within its budget");
  detail::set_costs(r.plan, evaluate(p, r.plan.schedule));
  if (r.plan.budget == 0) r.plan.budget = r.plan.peak;
  auto share = l;
  share.seconds = l.seconds * 3 / 4;
  r.curve = pareto_curve(p, evenly{points}, s, share, observers...);
  if (!r.plan.found()) r.plan.status = status::feasible;  // its steps are valid
  for (auto& point : r.curve) detail::adopt(point, r.plan, l.gap);
  if (r.plan.seconds <= r.store_all.seconds * (1 + 1e-9)) return r;
  r.more_bytes = report_step(p, r.store_all);
  share.seconds = l.seconds / 4;
  r.more = solve(p, std::max(clamp_budget(r.plan.budget), r.plan.peak) + r.more_bytes, s, start_from(r.plan.schedule), share,
                 observers...);
  // The curve may know a faster plan that fits.
  for (const auto& other : r.curve) detail::adopt(*r.more, other, l.gap);
  return r;
}

}  // namespace remat
