// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules, and a lower bound on the time of every schedule, from a MILP over several moments. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/multi_cut_bound.hpp>
#include <remat/core/incumbent.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/result.hpp>
#include <remat/core/schedule.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/order/eviction.hpp>
#include <remat/order/retain_more.hpp>

namespace remat {

/// Solves the MILP of `multi_cut_model` over several moments of the schedule, which chooses the values to keep at each. All other
/// values are recomputed where they are used, and evictions make the order fit. The bound holds for every schedule, and is the
/// strongest of the library. For graphs of any shape, of up to some thousand operations. Does not use copies to the host.
///
/// @tparam B the MILP backend
///
/// Complexity: that of `multi_cut_bound`, and some evictions for each of its solutions.
/// @code
/// auto r = remat::solve(p, budget, remat::moments<remat::highs::backend>{}, {.seconds = 10});
/// if (r.found()) std::cout << r.seconds << " s, within " << 100 * r.gap() << " % of the optimum\n";
/// @endcode
template <milp::backend B>
class moments {
 public:
  explicit moments(const bound::multi_cut_options& o, B backend = B()) : options_(o), backend_(std::move(backend)) {
    options_.validate();
  }
  moments() : moments(bound::multi_cut_options{}) {}

  std::string name() const { return "moments/" + std::string(backend_.name()); }

  /// @throws too_large for more operations than `multi_cut_model::max_operations`; any exception of the backend
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    const auto needed = needed_operations(p);
    incumbent best(p, budget);
    if (!best.offer(needed)) {
      if (needed.size() > bound::multi_cut_model::max_operations)
        throw too_large(name() + ": " + std::to_string(needed.size()) + " operations, at most " +
                        std::to_string(bound::multi_cut_model::max_operations) + " are possible; use min_cut or automatic");
      const auto b = bound::multi_cut_bound<B>(p, budget, m, options_, backend_,
                                               [&](const bound::multi_cut_model& form, const Eigen::VectorXd& x, double bound) {
                                                 round(p, form, x, budget, best, m);
                                                 best.report(m, std::to_string(form.moments().size()) + " moments", bound);
                                                 return best.seconds();
                                               });
      r.budget_bound = b.budget;
      if (std::isfinite(b.seconds))
        r.bound = b.seconds;
      else if (!best.found())
        r.status = status::infeasible;
    }
    best.put_into(r);
    return r;
  }

 private:
  /// Makes schedules of a solution: orders at several thresholds, with evictions if they do not fit, and retention where memory
  /// is left.
  static void round(const problem& p, const bound::multi_cut_model& form, const Eigen::VectorXd& x, bytes_t budget,
                    incumbent& best, monitor& m) {
    const auto stop = m.stop_check();
    std::vector<std::pair<double, std::vector<operation_id>>> fitting;  // time in s, order
    std::optional<std::vector<operation_id>> last;
    for (const double threshold : {0.5, 0.1, 0.9, 0.3, 0.7}) {
      auto order = bound::order_of(p, form, x, threshold);
      if (!order || order == last) continue;
      best.offer(*order);
      const bool small = p.operations().size() < 1000;
      for (const double part : {1.0, 0.95, 0.9})
        for (const double distance : order::eviction::distances) {
          if (stop() || (part < 1 && (!small || threshold != 0.5)) || (distance != 1 && !small)) continue;
          const auto within = static_cast<bytes_t>(part * static_cast<double>(budget));
          auto evicted = order::eviction(p, *order).run(within, {.distance = distance, .repetitions = 3}, stop);
          if (!evicted) continue;
          best.offer(*evicted);
          fitting.emplace_back(measure_order(p, *evicted).seconds, std::move(*evicted));
        }
      last = std::move(order);
    }
    std::sort(fitting.begin(), fitting.end());
    const std::size_t limit = p.operations().size() < 1000 ? 20 : 3;
    if (fitting.size() > limit) fitting.resize(limit);
    for (std::size_t i = 0; i < fitting.size() && !stop(); ++i)
      best.offer(order::retain_more(p, fitting[i].second, budget, stop));
  }

  bound::multi_cut_options options_;
  B backend_;
};

}  // namespace remat
