// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule within a budget, from MILPs over several moments. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/bound/multi_cut_model.hpp>
#include <remat/core/liveness.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/backend.hpp>
#include <remat/order/replay.hpp>

namespace remat::bound {

/// The order that a solution of `multi_cut_model` stands for: retains at each moment of which the solution has more than
/// `threshold`. It may need more than the budget. Complexity: that of `replay`.
inline std::optional<std::vector<operation_id>> order_of(const problem& p, const multi_cut_model& form, const Eigen::VectorXd& x,
                                                         double threshold = 0.5) {
  std::vector<std::vector<bool>> retained(form.moments().size(), std::vector<bool>(p.values().size(), false));
  std::vector<bool> free(p.values().size());
  for (value_id v = 0; v < free.size(); ++v) {
    free[v] = form.negligible(v);
    for (std::size_t j = 0; j < retained.size() && !free[v]; ++j) retained[j][v] = form.retained(x, j, v) > threshold;
  }
  return order::replay(p, form.moments(), retained, free);
}

/// Moments for `multi_cut_model`: at first a few on the path on which a schedule without recomputation has most on the device,
/// then more of it where solutions are over the budget.
class multi_cut_choice {
 public:
  /// @param p      the problem, with a needed operation; must outlive this
  /// @param budget bytes
  /// @param most   most moments, >= 1
  /// Complexity: O(values + edges).
  multi_cut_choice(const problem& p, bytes_t budget, std::size_t most) : p_(p), budget_(budget), most_(most) {
    const auto needed = needed_operations(p);
    const auto memory = measure_order(p, needed).memory;
    const auto peak = static_cast<double>(*std::max_element(memory.begin(), memory.end()));
    std::vector<double> load(p.operations().size(), 0), sum = load;  // of an operation, of the heaviest path to it
    std::vector<operation_id> before(p.operations().size(), none);
    operation_id end = needed.front();
    for (std::size_t i = 0; i < needed.size(); ++i) {
      const auto o = needed[i];
      for (auto u : p.operations()[o].inputs)
        if (!p.is_source(u) && sum[p.producer(u)] > sum[o]) sum[o] = sum[p.producer(u)], before[o] = p.producer(u);
      load[o] = peak > 0 ? static_cast<double>(memory[i]) / peak : 0;
      sum[o] += 1e-3 + load[o] * load[o];
      if (sum[o] > sum[end]) end = o;
    }
    for (; end != none; end = before[end]) path_.push_back(end);
    std::reverse(path_.begin(), path_.end());
    add(*std::max_element(path_.begin(), path_.end(), [&](auto a, auto b) { return load[a] < load[b]; }));
    for (const std::size_t sixth : {5U, 3U, 1U}) add(path_[sixth * path_.size() / 6]);
  }

  /// Ascending.
  const std::vector<operation_id>& moments() const { return moments_; }

  /// Adds moments at which the solution `x` itself seems to be over the budget. @return true if there are any
  bool add_strained(const multi_cut_model& form, const Eigen::VectorXd& x) {
    std::vector<std::pair<double, operation_id>> excess;
    for (auto o : path_)
      if (!is_moment(o)) excess.emplace_back(form.strain(x, o) - 1e-4, o);
    return add_worst(std::move(excess));
  }
  /// Adds moments at which the order behind `x` is over the budget. @return true if there are any
  bool add_exceeded(const multi_cut_model& form, const Eigen::VectorXd& x) {
    const auto order = order_of(p_, form, x);
    if (!order) return false;
    const auto memory = measure_order(p_, *order).memory;
    std::vector<std::pair<double, operation_id>> excess;
    auto next = path_.begin();
    bytes_t most = 0;  // since the last operation of the path
    for (std::size_t k = 0; k < order->size() && next != path_.end(); ++k) {
      most = std::max(most, memory[k]);
      if ((*order)[k] != *next) continue;
      if (!is_moment(*next)) excess.emplace_back(static_cast<double>(most - budget_), *next);
      most = 0;
      ++next;
    }
    return add_worst(std::move(excess));
  }

 private:
  bool is_moment(operation_id o) const { return std::binary_search(moments_.begin(), moments_.end(), o); }
  void add(operation_id o) {
    if (moments_.size() < most_ && !is_moment(o)) moments_.insert(std::lower_bound(moments_.begin(), moments_.end(), o), o);
  }
  /// One between each two moments, three in all.
  bool add_worst(std::vector<std::pair<double, operation_id>> excess) {
    std::stable_sort(excess.begin(), excess.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    const auto before = moments_;
    std::vector<std::ptrdiff_t> taken;
    for (const auto& [bytes, o] : excess) {
      if (taken.size() == 3 || bytes <= 0) break;
      const auto between = std::lower_bound(before.begin(), before.end(), o) - before.begin();
      if (std::find(taken.begin(), taken.end(), between) != taken.end()) continue;
      taken.push_back(between);
      add(o);
    }
    return moments_.size() > before.size();
  }

  const problem& p_;
  bytes_t budget_;
  std::size_t most_;
  std::vector<operation_id> path_, moments_;
};

/// A lower bound on the time of *every* schedule within a budget: the largest of `min_cut_bound`, linear relaxations of
/// `multi_cut_model` over more and more moments, and then the MILP itself. Moments are added where the last solution seems to be
/// over the budget. Where the problem allows copies to the host, it is `copy_bound` and the relaxations; of a problem that is not
/// plain, or has more than `multi_cut_model::most_operations`, `min_cut_bound` alone.
///
/// @tparam B      the MILP backend
/// @param p       the problem
/// @param budget  bytes
/// @param m       limits and stop; what is proven by then is returned
/// @param o       how hard to try
/// @param backend the backend
/// @param seen    called with each solution of a model and the bound so far, s; returns the time of the fastest schedule known,
/// s:
///                the search ends when the bound meets it
/// @return the bounds on time and budget
/// @throws bad_option for options out of range; what the backend throws
/// Complexity: that of some linear programs of O(moments (values + edges)) rows; exponential in the rest.
/// @code
/// remat::monitor m({.seconds = 10});
/// auto b = remat::bound::multi_cut_bound<remat::highs::backend>(p, budget, m);
/// std::cout << "no schedule takes less than " << b.seconds << " s\n";
/// @endcode
template <milp::backend B>
time_bound multi_cut_bound(const problem& p, bytes_t budget, monitor& m, const multi_cut_options& o = {}, const B& backend = B(),
                           const std::function<double(const multi_cut_model&, const Eigen::VectorXd&, double)>& seen = {}) {
  o.validate();
  auto best = min_cut_bound(p, budget, {}, [&] { return m.stopped(); });
  const auto operations = needed_operations(p).size();
  if (!p.plain() || operations == 0 || operations > multi_cut_model::most_operations || budget < best.budget) return best;

  const double safety = 1e-6 * p.total_seconds();  // backends may be off by that
  double known = milp::infinity;
  milp::options limits;
  limits.threads = m.limits().threads;
  limits.seed = m.limits().seed;
  milp::solution s;
  // Solves a model and takes its bound; true if there is work left to do.
  const auto improve = [&](const multi_cut_model& form, const milp::model& model) {
    limits.poll = [&](double, double bound) {
      m.report({.stage = std::to_string(form.moments().size()) + " moments",
                .best = known,
                .bound = std::max(best.seconds, std::min(bound, limits.cutoff) * form.unit() - safety)});
      return m.stopped();
    };
    s = milp::solve(backend, model, limits);
    const auto bound = std::min(s.bound, limits.cutoff);
    if (s.status == milp::status::infeasible && bound == milp::infinity) {
      best.seconds = milp::infinity;
      best.budget = std::max(best.budget, budget + 1);
      return false;
    }
    if (std::isfinite(bound)) best.seconds = std::max(best.seconds, bound * form.unit() - safety);
    if (s.found() && seen) known = seen(form, s.x, best.seconds);
    return !m.stopped() && known * (1 - m.limits().gap) > best.seconds;
  };

  multi_cut_choice choice(p, budget, o.moments);
  auto within = o;
  within.reach = 1;  // long windows cost more than they give until the moments are there
  const auto build = [&]() -> std::optional<multi_cut_model> {
    try {
      return std::optional<multi_cut_model>(std::in_place, p, budget, choice.moments(), within, milp::longest_row(backend),
                                            [&] { return m.stopped(); });
    } catch (const interrupted&) {
      return std::nullopt;
    }
  };
  for (bool again = true; again && !m.stopped();) {
    const auto built = build();
    if (!built) break;
    const auto& form = *built;
    const auto start = m.elapsed(), before = best.seconds;
    limits.seconds = m.remaining();
    limits.gap = 0;
    limits.cutoff = milp::infinity;
    if (!improve(form, form.relaxation()) || !s.found()) break;
    const bool quick = p.copies() || m.elapsed() - start < m.limits().seconds / 20;
    const bool rising = best.seconds > before * (1 + 1e-3);
    again = quick && (choice.add_strained(form, s.x) || (rising && within.reach == o.reach && choice.add_exceeded(form, s.x)));
    if (quick && !again && within.reach < o.reach) within.reach = o.reach, again = true;
    if (again || !o.integer || p.copies()) continue;  // with copies, branch and bound proves little more
    limits.gap = m.limits().gap / 2;
    limits.start.reset();
    again = false;
    for (const double share : {1.0 / 3, 1.0}) {  // of the time left; all of it once no more moments are found
      limits.seconds = share * m.remaining();
      limits.cutoff = known / form.unit();
      if (!improve(form, form.model())) return best;
      if (!s.found()) continue;
      again = choice.add_exceeded(form, s.x) || choice.add_strained(form, s.x);
      if (again || s.status == milp::status::optimal) break;
      limits.start = s.x;
    }
    limits.start.reset();
  }
  return best;
}

}  // namespace remat::bound
