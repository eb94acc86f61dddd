// SPDX-License-Identifier: Apache-2.0
/// @file
/// A solver of problems with copies, followed by a proof of a stronger bound. Needs Boost.Graph, Eigen and a MILP backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>

#include <remat/bound/multi_cut_bound.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/core/solver.hpp>
#include <remat/milp/backend.hpp>

namespace remat {

/// Runs Inner for at most four fifths of the time. If this does not prove the schedule optimal, improves the bound by some linear
/// relaxations over up to ten moments. The schedule is Inner's. A problem that is not plain is left to Inner alone.
///
/// @tparam Inner the solver, such as `offmate<>`
/// @tparam B     the MILP backend
///
/// Complexity: that of Inner and of `bound::multi_cut_bound`.
/// @code
/// auto r = remat::solve(p, budget, remat::proving<remat::offmate<>, remat::highs::backend>{}, {.seconds = 20});
/// @endcode
template <solver Inner, milp::backend B>
class proving {
 public:
  proving() : proving(Inner()) {}
  /// @param max_operations problems with more needed operations are left to Inner alone
  explicit proving(Inner inner, B backend = B(), std::size_t max_operations = 1000)
      : inner_(std::move(inner)), backend_(std::move(backend)), max_operations_(max_operations) {}

  std::string name() const { return inner_.name(); }
  bool plans_tiers() const { return remat::plans_tiers(inner_); }
  proving with_start(schedule s) const requires warm_startable<Inner> {
    return proving(inner_.with_start(std::move(s)), backend_, max_operations_);
  }

  /// @throws any exception of Inner and the backend
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    if (!p.plain() || needed_operations(p).size() > max_operations_) return inner_.solve(p, budget, m);
    monitor first(m, 0.8);
    auto r = judge(p, budget, name(), first, inner_.solve(p, budget, first));
    if (!r.found() || r.status == status::optimal) return r;
    monitor bound_monitor(m, 1, [&](progress x) {
      x.best = r.seconds, x.bound = std::max(x.bound, r.bound);
      m.report(std::move(x));
      return control::go_on;
    });
    const auto known_seconds = [&](const auto&, const auto&, double) { return r.seconds; };
    const auto proven =
        bound::multi_cut_bound<B>(p, budget, bound_monitor, {.moments = 10, .reach = 1}, backend_, known_seconds).seconds;
    if (std::isfinite(proven)) r.bound = std::max(r.bound, proven);  // infinity is wrong: a schedule is known
    return r;
  }

 private:
  Inner inner_;
  B backend_;
  std::size_t max_operations_;
};

}  // namespace remat
