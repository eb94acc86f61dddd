// SPDX-License-Identifier: Apache-2.0
/// @file
/// An anytime improver for schedules of any origin: large-neighbourhood search with a MILP. Needs Eigen.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/limits.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/backend.hpp>
#include <remat/milp/part.hpp>
#include <remat/solver/order.hpp>
#include <remat/solver/staged_form.hpp>

namespace remat {

/// How large the neighbourhoods of `improve_staged` are, and when it ends.
struct improve_staged_options {
  std::size_t columns = 300;   ///< 0/1 columns that are free at first, >= 1; adapted to what the backend can solve
  double window_seconds = 2;   ///< time that the backend may take for one neighbourhood, s, > 0
  std::size_t patience = 200;  ///< neighbourhoods without an improvement after which it ends, >= 1

  /// @throws bad_option naming the member that is out of range
  void validate() const {
    if (columns < 1) throw bad_option("improve_staged_options.columns must be >= 1, got 0");
    if (!(window_seconds > 0))
      throw bad_option("improve_staged_options.window_seconds must be > 0, got " + std::to_string(window_seconds));
    if (patience < 1) throw bad_option("improve_staged_options.patience must be >= 1, got 0");
  }
};

/// The same computations, those between two first computations sorted in the order of the first ones and without repetitions: a
/// staged order wherever that is still valid.
/// @param order a valid order of computations
/// Complexity: O(operations + n log n) for n computations.
inline std::vector<index_t> staged_order(const problem& p, const std::vector<index_t>& order) {
  const auto first = first_computations(p, with_drops(p, order));
  std::vector<std::size_t> place(first.size());
  for (std::size_t i = 0; i < first.size(); ++i) place[first[i]] = i;
  std::vector<index_t> staged, again;
  std::size_t made = 0;  // operations computed so far: the first ones of `first`
  const auto end_stage = [&] {
    std::sort(again.begin(), again.end(), [&](auto a, auto b) { return place[a] < place[b]; });
    staged.insert(staged.end(), again.begin(), std::unique(again.begin(), again.end()));
    again.clear();
  };
  for (auto o : order) {
    if (place[o] < made) {
      again.push_back(o);
      continue;
    }
    end_stage();
    staged.push_back(o);
    ++made;
  }
  end_stage();
  return prune_order(p, staged);
}

namespace detail {

/// A solution of a `staged_form`, and neighbourhoods of it that a backend searches.
template <milp::backend B>
class staged_search {
 public:
  staged_search(const problem& p, incumbent& best, monitor& m, const improve_staged_options& o, const B& backend)
      : p_(p), best_(best), m_(m), options_(o), backend_(backend), random_(m.limits().seed), target_(o.columns) {}

  /// Makes the model with the fewest columns in which the incumbent is a solution; false if it is in none.
  bool open() {
    const auto order = first_computations(p_, with_drops(p_, best_.order()));
    for (const auto& rules : {staging{.forward_in_one_stage = true, .recompute_where_used = true, .small_values = 0.01},
                              staging{.recompute_where_used = true, .small_values = 0.01}, staging{.small_values = 0.01}, staging{}}) {
      if (m_.stopped()) return false;
      auto r = rules;
      r.order = order;
      r.last_stage = true;
      form_.emplace(p_, best_.budget(), r, milp::longest_row<B>(), [&] { return m_.stopped(); });
      if (form_->complete() && load()) {
#ifdef SN_TRACE
        std::printf("rules %s columns %ld rows %ld nnz %ld\n", to_string(r).c_str(), form_->model().columns(), form_->model().rows(), form_->model().matrix.nonZeros());
#endif
        decisions_ = form_->decisions();
        index();
        return true;
      }
    }
    return false;
  }

  /// Frees one neighbourhood and searches it.
  /// @return true if the incumbent became faster
  bool step() {
    auto free = choose();
    const auto count = static_cast<std::size_t>(std::count(free.begin(), free.end(), true));
    form_->add_derived(free);
    const auto part = milp::fix_columns(form_->model(), x_, free);
    milp::options o;
    o.seconds = std::min(options_.window_seconds, m_.remaining());
    o.gap = 0;
    o.threads = m_.limits().threads;
    o.seed = random_();
    o.start = part.of(x_);
    o.poll = [&](double, double) { return m_.stopped(); };
#ifdef SN_TRACE
    const auto c0 = std::clock();
#endif
    const auto s = milp::solve(backend_, part.model, o);
    bool better = false;
    if (s.found() && s.objective < form_->model().objective(x_) - 1e-7 * std::abs(s.objective)) {
      part.put(s.x, x_);
      better = offer(compute_order(form_->extract(x_)));
    }
#ifdef SN_TRACE
    std::printf("  kind %d target %zu free %zu cols %ld rows %ld status %d cpu %.2f best %.6g %s\n", kind_, target_, count, part.model.columns(), part.model.rows(), (int)s.status, double(std::clock()-c0)/CLOCKS_PER_SEC, best_.seconds(), better?"*":"");
#endif
    if (s.status != milp::status::optimal)
      target_ = std::max<std::size_t>(1, target_ * 4 / 5);
    else if (!better)
      target_ = std::min(binaries_, target_ + target_ / 10 + 1);
    exhausted_ = s.status == milp::status::optimal && count == binaries_;
    return better;
  }
  /// Was the last neighbourhood the whole model, and searched to the end?
  bool exhausted() const { return exhausted_; }

 private:
  /// Takes the incumbent for the solution.
  bool load() {
    const auto order = staged_order(p_, best_.order());
    incumbent valid(p_, best_.budget());
    if (!valid.offer(order)) return false;
    auto x = form_->encode(with_drops(p_, order));
    if (!x || !milp::violation(form_->model(), *x).empty()) return false;
    x_ = std::move(*x);
    return true;
  }

  bool offer(std::vector<index_t> order) {
    order = retain_more(p_, std::move(order), best_.budget(), [&] { return m_.stopped(); });
    const bool better = best_.offer(order);
    if (better) load();
    return better;
  }

  /// Lists the 0/1 columns by stage and by operation.
  void index() {
    binaries_ = 0;
    by_stage_.clear(), by_operation_.clear();
    std::vector<std::size_t> place(p_.operations().size() + 1, 0);
    std::size_t i = 1;  // sources come first
    for (auto o : first_computations(p_, with_drops(p_, best_.order()))) place[o] = i++;
    by_operation_.resize(i);
    for (std::size_t j = 0; j < decisions_.size(); ++j) {
      if (!form_->model().integer[j]) continue;
      ++binaries_;
      const auto& d = decisions_[j];
      if (by_stage_.size() <= d.stage) by_stage_.resize(d.stage + 1);
      by_stage_[d.stage].push_back(j);
      by_operation_[d.operation == none ? 0 : place[d.operation]].push_back(j);
    }
    std::erase_if(by_operation_, [](const auto& c) { return c.empty(); });
    std::erase_if(by_stage_, [](const auto& c) { return c.empty(); });
  }

  /// Frees columns from a random group on, the groups around it following alternately, until there are `count` more.
  void grow(const std::vector<std::vector<std::size_t>>& groups, std::size_t count, std::vector<bool>& free) {
    auto low = random_() % groups.size(), high = low + 1;  // [low, high) are free
    const auto take = [&](const std::vector<std::size_t>& columns) {
      for (auto j : columns) {
        if (!free[j] && count > 0) --count;
        free[j] = true;
      }
    };
    take(groups[low]);
    while (count > 0 && (low > 0 || high < groups.size())) {
      if (low > 0) take(groups[--low]);
      if (count > 0 && high < groups.size()) take(groups[high++]);
    }
  }

  std::vector<bool> choose() {
    std::vector<bool> free(decisions_.size(), false);
    const auto kind = random_() % 3;
    kind_ = int(kind);
    if (kind == 0) grow(by_stage_, target_, free);
    if (kind == 1) grow(by_operation_, target_, free);
    if (kind == 2) {
      grow(by_operation_, target_ / 2, free);
      grow(by_operation_, target_ / 2, free);
    }
    return free;
  }

  int kind_ = 0;
  const problem& p_;
  incumbent& best_;
  monitor& m_;
  const improve_staged_options& options_;
  const B& backend_;
  std::mt19937_64 random_;
  std::size_t target_, binaries_ = 0;
  bool exhausted_ = false;
  std::optional<staged_form> form_;
  Eigen::VectorXd x_;
  std::vector<staged_model::decision> decisions_;
  std::vector<std::vector<std::size_t>> by_stage_, by_operation_;
};

}  // namespace detail

template <milp::backend B>
void improve_staged(const problem& p, incumbent& best, monitor& m, const improve_staged_options& o = {},
                    const B& backend = B(), double bound = 0) {
  o.validate();
  if (!best.found()) return;
  detail::staged_search<B> search(p, best, m, o, backend);
  const auto done = [&] { return m.stopped() || search.exhausted() || best.seconds() * (1 - m.limits().gap) <= bound; };
  if (done() || !search.open()) return;
  for (std::size_t idle = 0; idle < o.patience && !done(); ++idle) {
    if (!search.step()) continue;
    idle = 0;
    m.report({.stage = "staged neighbourhoods", .best = best.seconds(), .bound = bound});
  }
}

}  // namespace remat
