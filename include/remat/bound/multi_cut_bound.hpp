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

  /// Works on the order of moments whose bound is the lowest, until nothing raises that.
  void run() {
    std::vector<order> open(1);
    while (!open.empty()) {
      const auto lowest =
          std::min_element(open.begin(), open.end(), [](const auto& a, const auto& b) { return a.bound < b.bound; });
      auto now = std::move(*lowest);
      open.erase(lowest);
      others_ = milp::infinity;
      for (const auto& x : open) others_ = std::min(others_, x.bound);
      own_ = &now.bound;
      raise(now.bound);
      if (now.ended || done()) return;
      auto parts = work_on(now);
      if (parts.empty()) parts.push_back(std::move(now));
      for (auto& part : parts) open.push_back(std::move(part));
    }
  }

 private:
  using candidate = multi_cut_choice::candidate;

  /// A model, and a solution of its relaxation.
  struct solved_model {
    std::unique_ptr<multi_cut_model> form = {};
    milp::solution s = {};

    bool solved() const { return form && s.found(); }
    std::vector<operation_id> moments() const { return form ? form->moments() : std::vector<operation_id>(); }
    double seconds() const { return s.objective * form->unit(); }
    std::size_t rows() const { return static_cast<std::size_t>(form->model().rows()); }
  };
  /// The schedules with one order of some first runs, and how far the search is with them.
  struct order {
    solved_model now = {};
    double bound = 0;                         ///< on their time, s
    std::size_t rows = first_rows;            ///< up to which the model grows
    double worth = 1e-3;                      ///< the part by which another moment is to raise the relaxation
    std::vector<operation_id> branched = {};  ///< the moments of the last branch and bound
    bool prune = true;                        ///< may moments be of no use?
    bool exact = false;                       ///< that has ended by itself
    bool ended = false;                       ///< nothing is left to be done
  };

  // Chosen on U-Nets of depth 2, 4 and 5, where the root of branch and bound takes a second or two at 25 000 rows, and the best
  // addition was among the five worst places.
  static constexpr std::size_t first_rows = 25'000;                    // at which branch and bound first begins
  static constexpr std::size_t least_tries = 5, tried_rows = 100'000;  // relaxations for each addition, and their rows
  static constexpr std::size_t most_tried_rows = 60'000;  // a relaxation takes some seconds: places are taken untried

  bool branches() const { return options_.integer && !p_.copies(); }  // with copies, branching proves little more
  bool done() const { return m_.stopped() || known_ * (1 - m_.limits().gap) <= proven_.seconds; }
  /// How many places are tried for another moment; 0 if a relaxation is too expensive for that.
  std::size_t tries(const solved_model& now) const {
    if (!now.solved() || p_.copies() || now.rows() >= most_tried_rows) return 0;
    return std::clamp<std::size_t>(tried_rows / now.rows(), least_tries, 40);
  }

  /// Takes a bound on the time in the order that is worked on, s. The least of all orders is one for every schedule.
  void raise(double bound) {
    *own_ = std::max(*own_, bound);
    proven_.seconds = std::max(proven_.seconds, std::min(*own_, others_));
    if (std::isinf(proven_.seconds)) proven_.budget = std::max(proven_.budget, budget_ + 1);
  }
  /// Solves a model and takes its bound.
  milp::solution solve(const multi_cut_model& form, const milp::model& model) {
    const double safety = 1e-6 * std::max(p_.total_seconds(), form.unit());  // backends may be off by that
    limits_.seconds = m_.remaining();
    const auto stalls = std::exchange(limits_.poll, {});
    limits_.poll = [&](double best, double bound) {
      const double here = std::min(bound, limits_.cutoff) * form.unit() - safety;
      m_.report({.stage = std::to_string(form.moments().size()) + " moments",
                 .best = known_,
                 .bound = std::max(proven_.seconds, std::min(here, others_))});
      return m_.stopped() || (stalls && stalls(best, bound));
    };
    auto s = milp::solve(backend_, model, limits_);
    limits_.poll = {};
    const auto bound = std::min(s.bound, limits_.cutoff);
    if (s.status == milp::status::infeasible && bound == milp::infinity)
      raise(milp::infinity);
    else if (std::isfinite(bound))
      raise(bound * form.unit() - safety);
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

  /// Grows a model by moments that raise the bound of its relaxation, branches until that stalls, and adds the moments that the
  /// integral solution lacks.
  /// @return several orders in the place of `x`, if that is what raised the relaxation most
  std::vector<order> work_on(order& x) {
    if (!x.now.form) x.now = relax(choice_.first());
    auto parts = grow(x);
    if (!parts.empty()) return parts;
    if (!x.now.solved() || done() || !branches()) {
      x.ended = true;
      return {};
    }
    auto solution = x.now.s.x;
    if (std::exchange(x.branched, x.now.moments()) != x.now.moments()) solution = branch(x, true);
    if (done()) return {};
    x.rows *= 2;
    if (const auto more = lacking(*x.now.form, solution); more != x.now.moments()) {
      x.now = relax(more);
    } else if (x.worth > 1e-4) {
      x.worth /= 10;
    } else {
      if (!x.exact) branch(x, false);
      x.ended = true;
    }
    return {};
  }
  /// Adds moments as long as they raise the relaxation by a part that is worth it.
  /// @return as `work_on`
  std::vector<order> grow(order& x) {
    auto& now = x.now;
    if (now.solved()) tell(*now.form, now.s.x);
    const auto rows = branches() ? x.rows : std::numeric_limits<std::size_t>::max();
    while (now.solved() && !done() && now.rows() < rows && now.moments().size() < options_.moments) {
      if (tries(now) > 0 && x.prune) prune(now);
      auto places = choice_.strained(*now.form, now.s.x);
      solved_model next;
      if (tries(now) > 0) {
        auto parts = best_of(x, places, next);
        if (!parts.empty()) return parts;
        std::erase_if(places, [&](const auto& c) { return c.gain < x.worth * now.seconds(); });
      } else {
        std::erase_if(places, [&](const auto& c) { return c.gain <= 0; });
      }
      if (places.empty()) return {};
      const auto several = with(now.moments(), places);
      if (several != next.moments())
        if (auto together = relax(several); !next.solved() || (together.solved() && together.seconds() >= next.seconds()))
          next = std::move(together);
      if (!next.solved()) return {};
      now = std::move(next);
      tell(*now.form, now.s.x);
    }
    return {};
  }
  /// Tries the first `places`, one at a time; where operations that may run before or after moments seem to be over the budget,
  /// others along the path as well, and where none of these is worth it, those operations.
  /// @param places afterwards those that add most, and what each adds, s
  /// @param best   the best of these
  /// @return the orders of an operation that may run before or after moments, if that is worth it
  std::vector<order> best_of(order& x, std::vector<candidate>& places, solved_model& best) {
    const auto& now = x.now;
    auto beside = choice_.crowded(*now.form, now.s.x);
    places.resize(std::min(places.size(), least_tries));
    x.prune = !beside.empty();
    if (x.prune)
      for (const auto& c : choice_.along(now.moments(), tries(now) - least_tries)) places.push_back(c);
    const auto several = std::stable_partition(places.begin(), places.end(), [](const auto& c) { return c.decided(); });
    beside.insert(beside.begin(), several, places.end());
    places.erase(several, places.end());
    double most = 0;
    for (auto& c : places) {
      auto one = relax(c.among(now.moments(), c.from));
      c.gain = one.solved() ? one.seconds() - now.seconds() : 0;
      most = std::max(most, c.gain);
      if (one.solved() && (!best.solved() || one.seconds() > best.seconds())) best = std::move(one);
    }
    std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.gain > b.gain; });
    std::erase_if(places, [&](const auto& c) { return c.gain < most / 2; });
    std::vector<order> parts;
    const double worth = x.worth * now.seconds();
    if (most > worth) return parts;
    most = worth;
    beside.resize(std::min(beside.size(), least_tries));
    for (const auto& c : beside)
      if (auto [gain, orders] = divide(x, c, most); gain > most) most = gain, parts = std::move(orders);
    return parts;
  }
  /// Puts an operation into each of its places among the moments.
  /// @return what that adds to the lowest relaxation, s, and the orders; 0 once it is not more than `least`
  std::pair<double, std::vector<order>> divide(const order& x, const candidate& c, double least) {
    std::vector<order> parts;
    double gain = milp::infinity;
    auto* const own = own_;
    const double others = std::exchange(others_, 0);
    for (auto at = c.from; at <= c.to && gain > least; ++at) {
      order part{.bound = x.bound, .rows = x.rows, .worth = x.worth};
      own_ = &part.bound;
      part.now = relax(c.among(x.now.moments(), at));
      if (!part.now.solved() && std::isfinite(part.bound)) gain = 0;  // unknown
      if (part.now.solved()) gain = std::min(gain, part.now.seconds() - x.now.seconds());
      parts.push_back(std::move(part));
    }
    own_ = own;
    others_ = others;
    if (gain > least) return {gain, std::move(parts)};
    return {0, std::vector<order>()};
  }
  /// Takes out moments without which the relaxation has the same optimum.
  void prune(solved_model& now) {
    for (std::size_t j = now.moments().size(); j-- > 0 && now.moments().size() > 1;) {
      auto kept = now.moments();
      kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(j));
      if (auto less = relax(kept); less.solved() && less.seconds() > now.seconds() * (1 - 1e-5)) now = std::move(less);
    }
  }
  /// Some moments and up to three of `places`.
  std::vector<operation_id> with(std::vector<operation_id> moments, const std::vector<candidate>& places) const {
    for (std::size_t i = 0; i < std::min<std::size_t>(3, places.size()) && moments.size() < options_.moments; ++i)
      moments = choice_.with(std::move(moments), places[i].o);
    return moments;
  }
  /// The moments of a model, and those where its solution `x` is over the budget.
  std::vector<operation_id> lacking(const multi_cut_model& form, const Eigen::VectorXd& x) const {
    auto places = choice_.exceeded(form, x);
    if (places.empty()) places = choice_.strained(form, x);
    std::erase_if(places, [](const auto& c) { return c.gain <= 0; });
    return with(form.moments(), places);
  }

  /// Branch and bound.
  /// @param stalls it ends when twice the time has raised the bound by less than 0.1 %
  /// @return its solution, or that of the relaxation if it finds none
  Eigen::VectorXd branch(order& x, bool stalls) {
    const auto& form = *x.now.form;
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
    x.exact = s.status == milp::status::optimal || s.status == milp::status::cutoff;
    if (!s.found()) return x.now.s.x;
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
  double* own_ = nullptr;           // the bound of the order that is worked on
  double others_ = milp::infinity;  // the least of the other orders
};

/// A lower bound on the time of *every* schedule within a budget: the largest of `min_cut_bound`, linear relaxations of
/// `multi_cut_model` over more and more moments, and then the MILP itself. Moments are added where the last solution seems to be
/// over the budget. An operation that may run first before or after some of them makes a model for each order; the least of their
/// bounds counts. Where the problem allows copies to the host, it is `copy_bound` and the relaxations; of a problem that is not
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
