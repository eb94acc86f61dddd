// SPDX-License-Identifier: Apache-2.0
/// @file
/// A lower bound on the time of every schedule within a budget, from MILPs over several moments. Needs Boost.Graph and Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
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
  /// A place for another moment: by how much a solution is over the budget there, and the operation.
  using candidate = std::pair<double, operation_id>;

  /// @param p      the problem, with a needed operation; must outlive this
  /// @param budget bytes
  /// Complexity: O(values + edges).
  multi_cut_choice(const problem& p, bytes_t budget) : p_(p), budget_(budget) {
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
    first_ = with({}, *std::max_element(path_.begin(), path_.end(), [&](auto a, auto b) { return load[a] < load[b]; }));
    for (const std::size_t sixth : {5U, 3U, 1U}) first_ = with(std::move(first_), path_[sixth * path_.size() / 6]);
  }

  /// Moments to start with, ascending: the operation with most on the device, and three others.
  const std::vector<operation_id>& first() const { return first_; }

  /// Places where the solution `x` seems to be most over the budget: the worst between each two moments, worst first.
  std::vector<candidate> strained(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    std::vector<candidate> found;
    for (auto o : path_) found.emplace_back(form.strain(x, o) - 1e-4, o);
    return spread(std::move(found), form.moments());
  }
  /// Places where the order behind `x` is over the budget, likewise.
  std::vector<candidate> exceeded(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    const auto order = order_of(p_, form, x);
    if (!order) return {};
    const auto memory = measure_order(p_, *order).memory;
    std::vector<candidate> found;
    auto next = path_.begin();
    bytes_t most = 0;  // since the last operation of the path
    for (std::size_t k = 0; k < order->size() && next != path_.end(); ++k) {
      most = std::max(most, memory[k]);
      if ((*order)[k] != *next) continue;
      if (most > budget_) found.emplace_back(static_cast<double>(most - budget_), *next);
      most = 0;
      ++next;
    }
    return spread(std::move(found), form.moments());
  }

  /// The ascending `moments` with `o`.
  static std::vector<operation_id> with(std::vector<operation_id> moments, operation_id o) {
    const auto at = std::lower_bound(moments.begin(), moments.end(), o);
    if (at == moments.end() || *at != o) moments.insert(at, o);
    return moments;
  }

 private:
  /// The worst of `found` between each two moments, worst first.
  static std::vector<candidate> spread(std::vector<candidate> found, const std::vector<operation_id>& moments) {
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<candidate> worst;
    std::vector<bool> taken(moments.size() + 1, false);
    for (const auto& c : found) {
      if (std::binary_search(moments.begin(), moments.end(), c.second)) continue;
      const auto between = static_cast<std::size_t>(std::lower_bound(moments.begin(), moments.end(), c.second) - moments.begin());
      if (!taken[between]) worst.push_back(c);
      taken[between] = true;
    }
    return worst;
  }

  const problem& p_;
  bytes_t budget_;
  std::vector<operation_id> path_, first_;
};

/// Called with a solution of a model and the bound so far, s. Returns the time of the fastest schedule known, s: the search ends
/// when the bound meets it.
using multi_cut_observer = std::function<double(const multi_cut_model&, const Eigen::VectorXd&, double)>;

/// What `multi_cut_bound` does with a problem that has moments. Which models it solves, and in which order, does not depend on
/// the time limit: a longer limit goes on where a shorter one ends.
/// @tparam B the MILP backend
template <milp::backend B>
class multi_cut_search {
 public:
  /// @param proven what is known; is improved. All references must outlive this
  multi_cut_search(const problem& p, bytes_t budget, monitor& m, const multi_cut_options& o, const B& backend,
                   const multi_cut_observer& seen, time_bound& proven)
      : p_(p),
        budget_(budget),
        m_(m),
        options_(o),
        backend_(backend),
        seen_(seen),
        proven_(proven),
        choice_(p, budget),
        limits_(milp::options_within(m)) {}

  /// Grows a model by moments that raise the bound of its relaxation, branches until that stalls, adds the moments that the
  /// integral solution lacks, and begins again with a larger model.
  void run() {
    auto now = relax(choice_.first());
    bool prune = true;
    double worth = 1e-3;
    const bool branches = options_.integer && !p_.copies();  // with copies, branching proves little more
    std::vector<operation_id> branched;
    for (auto rows = branches ? first_rows : std::numeric_limits<std::size_t>::max();; rows *= 2) {
      grow(now, rows, worth, std::exchange(prune, false));
      if (!now.solved() || done() || !branches) return;
      auto x = now.s.x;
      if (std::exchange(branched, now.moments()) != now.moments()) x = branch(*now.form, std::move(x), true);
      if (done()) return;
      if (const auto more = lacking(*now.form, x); more != now.moments()) {
        now = relax(more);
      } else if (worth > 1e-4) {
        worth /= 10;
      } else {
        if (!exact_) branch(*now.form, std::move(x), false);
        return;
      }
    }
  }

 private:
  /// A model, and a solution of its relaxation.
  struct solved_model {
    std::unique_ptr<multi_cut_model> form = {};
    milp::solution s = {};

    bool solved() const { return form && s.found(); }
    std::vector<operation_id> moments() const { return form ? form->moments() : std::vector<operation_id>(); }
    double seconds() const { return s.objective * form->unit(); }
    std::size_t rows() const { return static_cast<std::size_t>(form->model().rows()); }
  };

  // Chosen on U-Nets of depth 2, 4 and 5, where the root of branch and bound takes a second or two at 25 000 rows, and the best
  // addition was among the five worst places.
  static constexpr std::size_t first_rows = 25'000;       // at which branch and bound first begins
  static constexpr std::size_t most_tries = 5;            // relaxations for each addition
  static constexpr std::size_t most_tried_rows = 60'000;  // a relaxation takes some seconds: places are taken untried

  bool done() const { return m_.stopped() || known_ * (1 - m_.limits().gap) <= proven_.seconds; }
  /// Is a relaxation cheap enough to be solved for each candidate?
  bool tries(const solved_model& now) const { return now.solved() && !p_.copies() && now.rows() < most_tried_rows; }

  /// Solves a model and takes its bound.
  milp::solution solve(const multi_cut_model& form, const milp::model& model) {
    const double safety = 1e-6 * std::max(p_.total_seconds(), form.unit());  // backends may be off by that
    limits_.seconds = m_.remaining();
    const auto stalls = std::exchange(limits_.poll, {});
    limits_.poll = [&](double best, double bound) {
      m_.report({.stage = std::to_string(form.moments().size()) + " moments",
                 .best = known_,
                 .bound = std::max(proven_.seconds, std::min(bound, limits_.cutoff) * form.unit() - safety)});
      return m_.stopped() || (stalls && stalls(best, bound));
    };
    auto s = milp::solve(backend_, model, limits_);
    limits_.poll = {};
    const auto bound = std::min(s.bound, limits_.cutoff);
    if (s.status == milp::status::infeasible && bound == milp::infinity) {
      proven_.seconds = milp::infinity;
      proven_.budget = std::max(proven_.budget, budget_ + 1);
    } else if (std::isfinite(bound)) {
      proven_.seconds = std::max(proven_.seconds, bound * form.unit() - safety);
    }
    return s;
  }
  void tell(const multi_cut_model& form, const Eigen::VectorXd& x) {
    if (seen_) known_ = seen_(form, x, proven_.seconds);
  }

  /// Solves the relaxation over some moments; no `form` if the search ends before.
  solved_model relax(const std::vector<operation_id>& moments) {
    solved_model now;
    if (m_.stopped()) return now;
    try {
      now.form = std::make_unique<multi_cut_model>(p_, budget_, moments, options_, milp::longest_row(backend_),
                                                   [&] { return m_.stopped(); });
    } catch (const interrupted&) {
      return now;
    }
    limits_.gap = 0;
    limits_.cutoff = milp::infinity;
    now.s = solve(*now.form, now.form->relaxation());
    return now;
  }

  /// Adds moments as long as they raise the relaxation by the part `worth`, up to `rows`.
  /// @param prune takes out moments at which there is room to spare: a smaller model with the same optimum branches faster
  void grow(solved_model& now, std::size_t rows, double worth, bool prune) {
    if (now.solved()) tell(*now.form, now.s.x);
    while (now.solved() && !done() && now.rows() < rows && now.moments().size() < options_.moments) {
      if (prune && tries(now)) prune_slack(now);
      auto places = choice_.strained(*now.form, now.s.x);
      solved_model next;
      if (tries(now)) {
        next = best_of(now, places);
        std::erase_if(places, [&](const auto& c) { return c.first < worth * now.seconds(); });
      } else {
        std::erase_if(places, [&](const auto& c) { return c.first <= 0; });
      }
      if (places.empty()) return;
      const auto several = with(now.moments(), places);
      if (several != next.moments())
        if (auto together = relax(several); !next.solved() || (together.solved() && together.seconds() >= next.seconds()))
          next = std::move(together);
      if (!next.solved()) return;
      now = std::move(next);
      tell(*now.form, now.s.x);
    }
  }
  /// Tries the first `places`, one at a time. Puts into them what each adds, s, most first. @return the best
  solved_model best_of(const solved_model& now, std::vector<multi_cut_choice::candidate>& places) {
    solved_model best;
    places.resize(std::min(places.size(), most_tries));
    for (auto& [gain, o] : places) {
      auto one = relax(multi_cut_choice::with(now.moments(), o));
      gain = one.solved() ? one.seconds() - now.seconds() : 0;
      if (one.solved() && (!best.solved() || one.seconds() > best.seconds())) best = std::move(one);
    }
    std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::erase_if(places, [&, most = places.empty() ? 0 : places[0].first](const auto& c) { return c.first < most / 2; });
    return best;
  }
  void prune_slack(solved_model& now) {
    std::vector<operation_id> kept;
    for (std::size_t j = 0; j < now.moments().size(); ++j)
      if (now.form->slack(now.s.x, j) < 1e-3) kept.push_back(now.moments()[j]);
    if (kept.empty() || kept == now.moments()) return;
    if (auto less = relax(kept); less.solved() && less.seconds() > now.seconds() * (1 - 1e-5)) now = std::move(less);
  }
  /// Some moments and up to three of `places`.
  std::vector<operation_id> with(std::vector<operation_id> moments,
                                 const std::vector<multi_cut_choice::candidate>& places) const {
    for (std::size_t i = 0; i < std::min<std::size_t>(3, places.size()) && moments.size() < options_.moments; ++i)
      moments = multi_cut_choice::with(std::move(moments), places[i].second);
    return moments;
  }
  /// The moments of a model, and those where its solution `x` is over the budget.
  std::vector<operation_id> lacking(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    auto places = choice_.exceeded(form, x);
    if (places.empty()) places = choice_.strained(form, x);
    std::erase_if(places, [](const auto& c) { return c.first <= 0; });
    return with(form.moments(), places);
  }

  /// Branch and bound.
  /// @param otherwise the answer if it finds no solution
  /// @param stalls    it ends when twice the time has raised the bound by less than 0.1 %
  /// @return its solution
  Eigen::VectorXd branch(const multi_cut_model& form, Eigen::VectorXd otherwise, bool stalls) {
    limits_.gap = m_.limits().gap / 2;
    limits_.cutoff = known_ / form.unit();
    double began = m_.elapsed(), next = 1, last = 0;  // when the bound is looked at next, and what it was, units
    if (stalls)
      limits_.poll = [&](double, double bound) {
        if (!std::isfinite(bound)) began = m_.elapsed();
        if (!(m_.elapsed() - began > next)) return false;
        next *= 2;
        return bound < std::exchange(last, bound) * (1 + 1e-3);
      };
    const auto s = solve(form, form.model());
    exact_ = s.status == milp::status::optimal || s.status == milp::status::cutoff;
    if (!s.found()) return otherwise;
    tell(form, s.x);
    return s.x;
  }

  const problem& p_;
  bytes_t budget_;
  monitor& m_;
  multi_cut_options options_;
  const B& backend_;
  const multi_cut_observer& seen_;
  time_bound& proven_;
  multi_cut_choice choice_;
  milp::options limits_;
  double known_ = milp::infinity;
  bool exact_ = false;  // branch and bound has ended by itself on the last model
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
/// @param seen    told of each solution
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
                           const multi_cut_observer& seen = {}) {
  o.validate();
  auto best = min_cut_bound(p, budget, {}, [&] { return m.stopped(); });
  const auto operations = needed_operations(p).size();
  if (!p.plain() || operations == 0 || operations > multi_cut_model::most_operations || budget < best.budget) return best;

  multi_cut_search<B>(p, budget, m, o, backend, seen, best).run();
  return best;
}

}  // namespace remat::bound
