// SPDX-License-Identifier: Apache-2.0
/// @file
/// Schedules, and a bound on all of them, from a MILP over several moments. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/moment_form.hpp>
#include <remat/core/limits.hpp>
#include <remat/core/result.hpp>
#include <remat/core/solve.hpp>
#include <remat/milp/backend.hpp>
#include <remat/solver/order.hpp>

namespace remat {

/// Computes what is needed up to each of several moments, forgets there what is not to be retained, goes on and computes what is
/// missing when it is needed.
/// @param p        the problem
/// @param needed   `needed_operations(p)`
/// @param moments  some of them, ascending, each an ancestor of the next
/// @param retained per moment and value: on the device just before the moment runs first; its operands are
/// @return the order, or nothing if a once-only operation would have to run again
/// Complexity: O(moments values + edges executed).
inline std::optional<std::vector<index_t>> order_through(const problem& p, const std::vector<index_t>& needed,
                                                         const std::vector<index_t>& moments,
                                                         const std::vector<std::vector<bool>>& retained) {
  const auto& ops = p.operations();
  std::vector<bool> there(p.values().size(), false), has_run(ops.size(), false), marked(ops.size(), false);
  for (index_t v = 0; v < there.size(); ++v) there[v] = p.is_source(v);
  std::vector<index_t> order, pending;
  // What has to be computed so that the values in `wanted` are there, ascending.
  const auto closure = [&](const std::vector<index_t>& wanted) {
    pending.clear();
    const auto need = [&](index_t v) {
      if (there[v] || p.is_source(v) || marked[p.producer(v)]) return;
      marked[p.producer(v)] = true;
      pending.push_back(p.producer(v));
    };
    for (auto v : wanted) need(v);
    for (std::size_t i = 0; i < pending.size(); ++i)
      for (auto v : ops[pending[i]].inputs) need(v);
    std::sort(pending.begin(), pending.end());
    for (auto o : pending) marked[o] = false;
    return pending;
  };
  const auto run = [&](const std::vector<index_t>& list) {
    for (auto o : list) {
      if (ops[o].once && has_run[o]) return false;
      has_run[o] = true;
      order.push_back(o);
      for (auto v : ops[o].outputs) there[v] = true;
    }
    return true;
  };
  for (std::size_t j = 0; j <= moments.size(); ++j) {
    std::vector<index_t> wanted = p.targets();
    if (j < moments.size()) {
      wanted = ops[moments[j]].inputs;
      for (index_t v = 0; v < there.size(); ++v)
        if (retained[j][v]) wanted.push_back(v);
    }
    // First runs in the order of the problem, each preceded by what it lacks; then what is to be retained and was lost.
    for (auto o : closure(wanted))
      if (!has_run[o]) {
        auto list = ops[o].inputs;
        if (!run(closure(list)) || !run({o})) return std::nullopt;
      }
    if (!run(closure(wanted))) return std::nullopt;
    if (j == moments.size()) break;
    for (index_t v = 0; v < there.size(); ++v)
      there[v] = p.is_source(v) || (there[v] && retained[j][v]) ||
                 std::binary_search(ops[moments[j]].inputs.begin(), ops[moments[j]].inputs.end(), v);
    if (!run({moments[j]})) return std::nullopt;
  }
  (void)needed;
  return prune_order(p, order);
}

/// Retains at several moments of the schedule what the MILP of `moment_form` over them says, makes the rest again where it is
/// used, and evicts where that does not fit. Its bound holds for every schedule, and is the strongest of the library. For graphs
/// of any shape, of up to some thousand operations. Copies to the host are not used.
///
/// @tparam B the MILP backend
///
/// Complexity: that of `moment_bound`, and some evictions for each of its solutions.
/// @code
/// auto r = remat::solve(p, budget, remat::moments<remat::highs::backend>{}, {.seconds = 10});
/// if (r.found()) std::cout << r.seconds << " s, at most " << 100 * r.gap() << " % above the optimum\n";
/// @endcode
template <milp::backend B>
class moments {
 public:
  explicit moments(const moment_options& o, B backend = B()) : options_(o), backend_(std::move(backend)) { options_.validate(); }
  moments() : moments(moment_options{}) {}

  std::string name() const { return "moments/" + std::string(backend_.name()); }

  /// @throws what the backend throws
  result solve(const problem& p, bytes_t budget, monitor& m) const {
    result r;
    const auto needed = needed_operations(p);
    incumbent best(p, budget);
    if (!best.offer(needed)) {
      const auto b =
          moment_bound<B>(p, budget, m, options_, backend_, [&](const moment_form& form, const Eigen::VectorXd& x, double bound) {
            round(p, needed, form, x, budget, best, m);
            m.report({.stage = std::to_string(form.moments().size()) + " moments", .best = best.seconds(), .bound = bound});
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
  /// Makes schedules of a solution, offers them.
  static void round(const problem& p, const std::vector<index_t>& needed, const moment_form& form, const Eigen::VectorXd& x,
                    bytes_t budget, incumbent& best, monitor& m) {
    const auto stop = [&] { return m.stopped(); };
    std::vector<std::vector<bool>> last;
    for (const double threshold : {0.5, 0.1, 0.9, 0.3, 0.7}) {
      std::vector<std::vector<bool>> retained(form.moments().size(), std::vector<bool>(p.values().size()));
      for (std::size_t j = 0; j < retained.size(); ++j)
        for (index_t v = 0; v < p.values().size(); ++v) retained[j][v] = form.retained(x, j, v) > threshold;
      if (retained == last) continue;
      last = retained;
      const auto order = order_through(p, needed, form.moments(), retained);
      if (!order) continue;
      best.offer(*order);
      for (const double distance : {1.0, 0.5, 2.0}) {
        if (stop()) return;
        const auto evicted = eviction(p, *order).run(budget, {.distance = distance}, stop);
        if (!evicted) continue;
        best.offer(*evicted);
        best.offer(retain_more(p, *evicted, budget, stop));
      }
    }
  }

  moment_options options_;
  B backend_;
};

}  // namespace remat
