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
#include <string>
#include <utility>
#include <vector>

#include <remat/bound/min_cut_bound.hpp>
#include <remat/bound/multi_cut_choice.hpp>
#include <remat/bound/multi_cut_model.hpp>
#include <remat/core/monitor.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/backend.hpp>

namespace remat::bound {

/// Called with a model, a solution of it, and the bound so far, s. Returns the time of the fastest schedule known, s. The search
/// ends when the bound reaches this time.
using multi_cut_observer = std::function<double(const multi_cut_model&, const Eigen::VectorXd&, double)>;

/// The search of `multi_cut_bound`. The models that it solves, and their order, do not depend on the time limit: a longer limit
/// continues where a shorter one ends.
/// @tparam B the MILP backend
template <milp::backend B>
class multi_cut_search {
 public:
  /// @param p           the problem, plain, with a needed operation
  /// @param budget      bytes
  /// @param m           limits and stop
  /// @param o           options
  /// @param backend     the MILP backend
  /// @param on_solution called with each solution; may be empty
  /// @param proven      the bounds known so far; raised by the search. All references must outlive this
  multi_cut_search(const problem& p, bytes_t budget, monitor& m, const multi_cut_options& o, const B& backend,
                   const multi_cut_observer& on_solution, time_bound& proven)
      : p_(p),
        budget_(budget),
        m_(m),
        options_(o),
        backend_(backend),
        on_solution_(on_solution),
        proven_(proven),
        choice_(p, budget),
        limits_(milp::options_within(m)) {}

  /// Works on the order with the lowest bound, again and again, until nothing raises this bound.
  void run() {
    std::vector<order> open(1);
    while (!open.empty()) {
      const auto lowest =
          std::min_element(open.begin(), open.end(), [](const auto& a, const auto& b) { return a.bound < b.bound; });
      auto chosen = std::move(*lowest);
      open.erase(lowest);
      lowest_other_bound_ = milp::infinity;
      for (const auto& x : open) lowest_other_bound_ = std::min(lowest_other_bound_, x.bound);
      current_bound_ = &chosen.bound;
      raise_bound(chosen.bound);
      if (chosen.ended || done()) return;
      auto parts = search_order(chosen);
      if (parts.empty()) parts.push_back(std::move(chosen));
      for (auto& part : parts) open.push_back(std::move(part));
    }
  }

 private:
  using candidate = multi_cut_choice::candidate;

  /// A model, and the solution of its relaxation.
  struct solved_model {
    std::unique_ptr<multi_cut_model> form = {};
    milp::solution solution = {};

    bool solved() const { return form && solution.found(); }
    std::vector<operation_id> moments() const { return form ? form->moments() : std::vector<operation_id>(); }
    double seconds() const { return solution.objective * form->unit(); }
    std::size_t rows() const { return static_cast<std::size_t>(form->model().rows()); }
  };
  /// The schedules with one order of the moments, and the state of the search among them.
  struct order {
    solved_model model = {};
    double bound = 0;                         ///< lower bound on their time, s
    std::size_t max_rows = first_rows;        ///< the model grows up to this number of rows
    double min_gain = 1e-3;                   ///< least relative gain of the relaxation for which a moment is added
    std::vector<operation_id> branched = {};  ///< moments of the last branch and bound
    bool prune = true;                        ///< some moments may be useless
    bool exact = false;                       ///< the last branch and bound ran to its end
    bool ended = false;                       ///< the search has nothing left to try
  };

  // Chosen on U-Nets of depth 2, 4 and 5. There the root of branch and bound takes a second or two at 25 000 rows, and the best
  // additional moment was among the five worst places.
  static constexpr std::size_t first_rows = 25'000;                    // of the model at the first branch and bound
  static constexpr std::size_t least_tries = 5, tried_rows = 100'000;  // relaxations per added moment, and their total rows
  static constexpr std::size_t max_tried_rows = 60'000;  // above, a relaxation takes seconds: moments are added untried

  bool branches() const { return options_.integer && !p_.copies(); }  // with copies, branching proves little more
  bool done() const { return m_.stopped() || fastest_known_ * (1 - m_.limits().gap) <= proven_.seconds; }
  /// The number of places to try for another moment. 0 if a relaxation is too expensive for trials.
  std::size_t tries(const solved_model& model) const {
    if (!model.solved() || p_.copies() || model.rows() >= max_tried_rows) return 0;
    return std::clamp<std::size_t>(tried_rows / model.rows(), least_tries, 40);
  }

  /// Raises the bound of the current order. The lowest bound of all orders holds for every schedule.
  /// @param bound s
  void raise_bound(double bound) {
    *current_bound_ = std::max(*current_bound_, bound);
    proven_.seconds = std::max(proven_.seconds, std::min(*current_bound_, lowest_other_bound_));
    if (std::isinf(proven_.seconds)) proven_.budget = std::max(proven_.budget, budget_ + 1);
  }
  /// Solves a model and raises the bound of the current order by the result.
  milp::solution solve(const multi_cut_model& form, const milp::model& model) {
    const double safety = 1e-6 * std::max(p_.total_seconds(), form.unit());  // tolerance of backends
    limits_.seconds = m_.remaining();
    const auto stop_if_stalled = std::exchange(limits_.poll, {});
    limits_.poll = [&](double best, double bound) {
      const double here = std::min(bound, limits_.cutoff) * form.unit() - safety;
      m_.report({.stage = std::to_string(form.moments().size()) + " moments",
                 .best = fastest_known_,
                 .bound = std::max(proven_.seconds, std::min(here, lowest_other_bound_))});
      return m_.stopped() || (stop_if_stalled && stop_if_stalled(best, bound));
    };
    auto s = milp::solve(backend_, model, limits_);
    limits_.poll = {};
    const auto bound = std::min(s.bound, limits_.cutoff);
    if (s.status == milp::status::infeasible && bound == milp::infinity)
      raise_bound(milp::infinity);
    else if (std::isfinite(bound))
      raise_bound(bound * form.unit() - safety);
    return s;
  }
  void report_solution(const multi_cut_model& form, const Eigen::VectorXd& x) {
    if (on_solution_) fastest_known_ = on_solution_(form, x, proven_.seconds);
  }

  /// Solves the relaxation over some moments.
  /// @return has no `form` if the search is stopped before the model is built
  solved_model relax(const std::vector<operation_id>& moments) {
    solved_model model;
    if (m_.stopped()) return model;
    try {
      model.form = std::make_unique<multi_cut_model>(p_, budget_, moments, options_, milp::longest_row(backend_),
                                                     [&] { return m_.stopped(); });
    } catch (const interrupted&) {
      return model;
    }
    limits_.gap = 0;
    limits_.cutoff = milp::infinity;
    model.solution = solve(*model.form, model.form->relaxation());
    return model;
  }

  /// Grows the model by moments that raise its relaxation. Then branches until the bound stalls. Then adds moments where the
  /// integral solution is over the budget.
  /// @return several orders in the place of `x`, if a division raised the relaxation most; else none
  std::vector<order> search_order(order& x) {
    if (!x.model.form) x.model = relax(choice_.first());
    auto parts = grow(x);
    if (!parts.empty()) return parts;
    if (!x.model.solved() || done() || !branches()) {
      x.ended = true;
      return {};
    }
    auto solution = x.model.solution.x;
    if (std::exchange(x.branched, x.model.moments()) != x.model.moments()) solution = branch(x, true);
    if (done()) return {};
    x.max_rows *= 2;
    if (const auto more = moments_where_exceeded(*x.model.form, solution); more != x.model.moments()) {
      x.model = relax(more);
    } else if (x.min_gain > 1e-4) {
      x.min_gain /= 10;
    } else {
      if (!x.exact) branch(x, false);
      x.ended = true;
    }
    return {};
  }
  /// Adds moments while they raise the relaxation by the part `x.min_gain`. If trials are too expensive, adds moments untried,
  /// where the solution seems to be over the budget.
  /// @return as for `search_order`
  std::vector<order> grow(order& x) {
    auto& model = x.model;
    if (model.solved()) report_solution(*model.form, model.solution.x);
    const auto max_rows = branches() ? x.max_rows : std::numeric_limits<std::size_t>::max();
    while (model.solved() && !done() && model.rows() < max_rows && model.moments().size() < options_.moments) {
      if (tries(model) > 0 && x.prune) prune(model);
      auto places = choice_.excess_on_path(*model.form, model.solution.x);
      solved_model next;
      if (tries(model) > 0) {
        auto parts = try_places(x, places, next);
        if (!parts.empty()) return parts;
        std::erase_if(places, [&](const auto& c) { return c.gain < x.min_gain * model.seconds(); });
      } else {
        std::erase_if(places, [&](const auto& c) { return c.gain <= 0; });
      }
      if (places.empty()) return {};
      const auto several = with_places(model.moments(), places);
      if (several != next.moments())
        if (auto together = relax(several); !next.solved() || (together.solved() && together.seconds() >= next.seconds()))
          next = std::move(together);
      if (!next.solved()) return {};
      model = std::move(next);
      report_solution(*model.form, model.solution.x);
    }
    return {};
  }
  /// Solves a relaxation for each of the first `places`. If operations beside the path seem to be over the budget, tries places
  /// all along the path as well. If none of these raises the relaxation enough, divides at such an operation.
  /// @param places afterwards the places that raise the relaxation most, each with its gain, s
  /// @param best   afterwards the best of the models tried
  /// @return the orders of the division, if it raises the relaxation enough; else none
  std::vector<order> try_places(order& x, std::vector<candidate>& places, solved_model& best) {
    const auto& model = x.model;
    auto beside = choice_.excess_beside_path(*model.form, model.solution.x);
    places.resize(std::min(places.size(), least_tries));
    x.prune = !beside.empty();
    if (x.prune)
      for (const auto& c : choice_.evenly_along_path(model.moments(), tries(model) - least_tries)) places.push_back(c);
    const auto several = std::stable_partition(places.begin(), places.end(), [](const auto& c) { return c.decided(); });
    beside.insert(beside.begin(), several, places.end());
    places.erase(several, places.end());
    double max_gain = 0;
    for (auto& c : places) {
      auto extended = relax(c.inserted_at(model.moments(), c.from));
      c.gain = extended.solved() ? extended.seconds() - model.seconds() : 0;
      max_gain = std::max(max_gain, c.gain);
      if (extended.solved() && (!best.solved() || extended.seconds() > best.seconds())) best = std::move(extended);
    }
    std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.gain > b.gain; });
    std::erase_if(places, [&](const auto& c) { return c.gain < max_gain / 2; });
    std::vector<order> parts;
    const double min_gain = x.min_gain * model.seconds();
    if (max_gain > min_gain) return parts;
    max_gain = min_gain;
    beside.resize(std::min(beside.size(), least_tries));
    for (const auto& c : beside)
      if (auto [gain, orders] = divide(x, c, max_gain); gain > max_gain) max_gain = gain, parts = std::move(orders);
    return parts;
  }
  /// Makes an order for each place of the operation `c` among the moments.
  /// @param least seconds; the division ends once it cannot gain more
  /// @return the rise of the lowest relaxation, s, and the orders; 0 and none if the rise is not above `least`
  std::pair<double, std::vector<order>> divide(const order& x, const candidate& c, double least) {
    std::vector<order> parts;
    double gain = milp::infinity;
    auto* const own = current_bound_;
    const double others = std::exchange(lowest_other_bound_, 0);
    for (auto at = c.from; at <= c.to && gain > least; ++at) {
      order part{.bound = x.bound, .max_rows = x.max_rows, .min_gain = x.min_gain};
      current_bound_ = &part.bound;
      part.model = relax(c.inserted_at(x.model.moments(), at));
      if (!part.model.solved() && std::isfinite(part.bound)) gain = 0;  // gain unknown
      if (part.model.solved()) gain = std::min(gain, part.model.seconds() - x.model.seconds());
      parts.push_back(std::move(part));
    }
    current_bound_ = own;
    lowest_other_bound_ = others;
    if (gain > least) return {gain, std::move(parts)};
    return {0, std::vector<order>()};
  }
  /// Removes moments without which the relaxation has the same optimum.
  void prune(solved_model& model) {
    for (std::size_t j = model.moments().size(); j-- > 0 && model.moments().size() > 1;) {
      auto kept = model.moments();
      kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(j));
      if (auto less = relax(kept); less.solved() && less.seconds() > model.seconds() * (1 - 1e-5)) model = std::move(less);
    }
  }
  /// `moments` and up to three of `places`.
  std::vector<operation_id> with_places(std::vector<operation_id> moments, const std::vector<candidate>& places) const {
    for (std::size_t i = 0; i < std::min<std::size_t>(3, places.size()) && moments.size() < options_.moments; ++i)
      moments = choice_.with_if_decided(std::move(moments), places[i].o);
    return moments;
  }
  /// The moments of a model, and up to three places where its solution `x` is over the budget.
  std::vector<operation_id> moments_where_exceeded(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    auto places = choice_.excess_of_order(form, x);
    if (places.empty()) places = choice_.excess_on_path(form, x);
    std::erase_if(places, [](const auto& c) { return c.gain <= 0; });
    return with_places(form.moments(), places);
  }

  /// Branch and bound.
  /// @param stop_if_stalled end when twice the time has raised the bound by less than 0.1 %
  /// @return the solution found, else that of the relaxation
  Eigen::VectorXd branch(order& x, bool stop_if_stalled) {
    const auto& form = *x.model.form;
    limits_.gap = m_.limits().gap / 2;
    limits_.cutoff = fastest_known_ / form.unit();
    double start = m_.elapsed(), next = 1, last = 0;  // `next`: when the bound is looked at, s; `last`: the bound then, units
    if (stop_if_stalled)
      limits_.poll = [&](double, double bound) {
        if (!std::isfinite(bound)) start = m_.elapsed();
        if (!(m_.elapsed() - start > next)) return false;
        next *= 2;
        return bound < std::exchange(last, bound) * (1 + 1e-3);
      };
    const auto s = solve(form, form.model());
    x.exact = s.status == milp::status::optimal || s.status == milp::status::cutoff;
    if (!s.found()) return x.model.solution.x;
    report_solution(form, s.x);
    return s.x;
  }

  const problem& p_;
  bytes_t budget_;
  monitor& m_;
  multi_cut_options options_;
  const B& backend_;
  const multi_cut_observer& on_solution_;
  time_bound& proven_;
  multi_cut_choice choice_;
  milp::options limits_;
  double fastest_known_ = milp::infinity;
  double* current_bound_ = nullptr;             // bound of the order that is worked on
  double lowest_other_bound_ = milp::infinity;  // lowest bound of the other orders
};

/// A lower bound on the time of *every* schedule within a budget. It is the largest of `min_cut_bound`, of linear relaxations of
/// `multi_cut_model` over more and more moments, and of the MILP itself. Moments are added where the last solution seems to be
/// over the budget. If the first run of an operation may lie before or after some moments, each order has a model. The lowest of
/// their bounds counts.
///
/// With copies to the host, the bound is the larger of `copy_bound` and the relaxations. If the problem is not plain, or has more
/// needed operations than `multi_cut_model::max_operations`, the bound is that of `min_cut_bound`.
///
/// @tparam B          the MILP backend
/// @param p           the problem
/// @param budget      bytes
/// @param m           limits and stop; a stopped search returns the bounds that are proven by then
/// @param o           how hard to try
/// @param backend     the MILP backend
/// @param on_solution called with each solution
/// @return the bounds on time and budget
/// @throws bad_option if a member of `o` is out of range; exceptions of the backend
/// Complexity: that of some linear programs of O(moments (values + edges)) rows; branch and bound is exponential.
/// @code
/// remat::monitor m({.seconds = 10});
/// auto b = remat::bound::multi_cut_bound<remat::highs::backend>(p, budget, m);
/// std::cout << "no schedule takes less than " << b.seconds << " s\n";
/// @endcode
template <milp::backend B>
time_bound multi_cut_bound(const problem& p, bytes_t budget, monitor& m, const multi_cut_options& o = {}, const B& backend = B(),
                           const multi_cut_observer& on_solution = {}) {
  o.validate();
  auto best = min_cut_bound(p, budget, {}, m.stop_check());
  const auto operations = needed_operations(p).size();
  if (!p.plain() || operations == 0 || operations > multi_cut_model::max_operations || budget < best.budget) return best;

  multi_cut_search<B>(p, budget, m, o, backend, on_solution, best).run();
  return best;
}

}  // namespace remat::bound
