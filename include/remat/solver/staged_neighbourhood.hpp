// SPDX-License-Identifier: Apache-2.0
/// @file
/// An anytime improver for schedules of any origin: large-neighbourhood search with a MILP. Needs Eigen.
#pragma once

#include <algorithm>
#include <array>
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
  std::size_t columns = 1000;  ///< 0/1 columns that are free at first, >= 1; adapted to what the backend can solve
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

/// The same computations, those that are made again in stages: just before a first computation, in the order of the first ones
/// and without repetitions. The answer is staged wherever it is still valid and within the budget.
/// @param order a valid order of computations
/// @param delay move each computation that is made again to the stage that first uses it; otherwise it stays in its own
/// Complexity: O(operations + values + n log n + edges executed) for n computations.
inline std::vector<index_t> staged_order(const problem& p, const std::vector<index_t>& order, bool delay) {
  const auto first = first_computations(p, with_drops(p, order));
  const auto end = first.size();
  std::vector<std::size_t> place(end), stage;
  for (std::size_t i = 0; i < end; ++i) place[first[i]] = i;
  std::size_t made = 0;
  for (auto o : order) {
    stage.push_back(made);
    if (place[o] == made) ++made;
  }
  std::vector<std::size_t> used(p.values().size(), end);  // stage of the next use of each value
  std::vector<std::vector<index_t>> again(end + 1);
  for (std::size_t k = order.size(); k-- > 0;) {
    const auto& op = p.operations()[order[k]];
    if (place[order[k]] != stage[k]) {
      if (delay) {
        stage[k] = end;
        for (auto v : op.outputs) stage[k] = std::min(stage[k], used[v]);
      }
      again[stage[k]].push_back(order[k]);
    }
    for (auto v : op.outputs) used[v] = end;
    for (auto v : op.inputs) used[v] = std::min(used[v], stage[k]);
  }
  std::vector<index_t> staged;
  for (std::size_t s = 0; s <= end; ++s) {
    auto& sorted = again[s];
    std::sort(sorted.begin(), sorted.end(), [&](auto a, auto b) { return place[a] < place[b]; });
    staged.insert(staged.end(), sorted.begin(), std::unique(sorted.begin(), sorted.end()));
    if (s < made) staged.push_back(first[s]);
  }
  return prune_order(p, staged);
}

namespace detail {

/// A solution of a `staged_form`, and neighbourhoods of it that a backend searches.
template <milp::backend B>
class staged_search {
 public:
  staged_search(const problem& p, incumbent& best, monitor& m, const improve_staged_options& o, const B& backend)
      : p_(p), best_(best), m_(m), options_(o), backend_(backend), random_(m.limits().seed) {
    columns_.fill(o.columns);
  }

  /// Makes the model with the fewest columns in which the incumbent is a solution; false if it is in none.
  bool open() {
    const auto order = first_computations(p_, with_drops(p_, best_.order()));
    for (const auto& [in_one, where_used] : {std::pair{true, true}, {true, false}, {false, false}}) {
      if (m_.stopped()) return false;
      const staging r{.forward_in_one_stage = in_one, .recompute_where_used = where_used, .order = order, .last_stage = true};
      delay_ = where_used;
      form_.emplace(p_, best_.budget(), r, milp::longest_row<B>(), [&] { return m_.stopped(); });
      if (form_->complete() && load()) {
        index();
        return true;
      }
    }
    return false;
  }

  /// Frees one neighbourhood and searches it.
  /// @return true if the incumbent became faster
  bool step() {
    const auto level = random_() % distances_.size();
    auto& columns = columns_[level];
    auto free = choose(columns, distances_[level]);
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
    const auto s = milp::solve(backend_, part.model, o);
    bool better = false;
    if (s.found() && s.objective < form_->model().objective(x_) * (1 - 1e-9)) {
      part.put(s.x, x_);
      better = best_.offer(retain_more(p_, compute_order(form_->extract(x_)), best_.budget(), [&] { return m_.stopped(); }));
      load();
    }
    if (s.status != milp::status::optimal)
      columns = std::max<std::size_t>(1, columns * 4 / 5);
    else if (!better)
      columns = std::min(binaries_, columns + columns / 4 + 1);
    exhausted_ = s.status == milp::status::optimal && count == binaries_ && !better;
    return better;
  }
  /// Was the last neighbourhood the whole model, and searched to the end?
  bool exhausted() const { return exhausted_; }

 private:
  /// Takes the incumbent for the solution.
  bool load() {
    const auto order = staged_order(p_, best_.order(), delay_);
    incumbent valid(p_, best_.budget());
    if (!valid.offer(order)) return false;
    auto x = form_->encode(with_drops(p_, order));
    if (!x || !milp::violation(form_->model(), *x).empty()) return false;
    x_ = std::move(*x);
    return true;
  }

  /// Lists the 0/1 columns by stage and by operation.
  void index() {
    decisions_ = form_->decisions();
    group_.assign(p_.operations().size(), 0);
    std::size_t groups = 1;  // that of sources comes first
    for (auto o : first_computations(p_, with_drops(p_, best_.order()))) group_[o] = groups++;
    by_operation_.assign(groups, {});
    by_stage_.clear();
    binaries_ = 0;
    for (std::size_t j = 0; j < decisions_.size(); ++j) {
      if (!form_->model().integer[j]) continue;
      ++binaries_;
      const auto& d = decisions_[j];
      if (by_stage_.size() <= d.stage) by_stage_.resize(d.stage + 1);
      by_stage_[d.stage].push_back(j);
      by_operation_[group_of(j)].push_back(j);
    }
  }
  std::size_t group_of(std::size_t j) const { return decisions_[j].operation == none ? 0 : group_[decisions_[j].operation]; }
  bool one(std::size_t j) const { return x_[static_cast<Eigen::Index>(j)] > 0.5; }

  /// Frees the columns of a group and of those around it, alternately, until there are `count` more.
  /// @param far computations farther than this from the block that they serve stay fixed, unless the solution has them
  void grow(const std::vector<std::vector<std::size_t>>& groups, std::size_t middle, std::size_t count, std::size_t far,
            std::vector<bool>& free) const {
    auto low = middle, high = middle;  // [low, high) are free
    const auto take = [&](const std::vector<std::size_t>& columns) {
      for (auto j : columns) {
        if (free[j] || (decisions_[j].distance > far && !one(j))) continue;
        free[j] = true;
        if (count > 0) --count;
      }
    };
    while (count > 0 && (low > 0 || high < groups.size())) {
      if (high < groups.size()) take(groups[high++]);
      if (count > 0 && low > 0) take(groups[--low]);
    }
  }

  /// Columns to free: those of a window of stages, of operations, or of an operation that is computed again and of some whose
  /// values take its place.
  std::vector<bool> choose(std::size_t count, std::size_t far) {
    std::vector<bool> free(decisions_.size(), false);
    const auto kind = random_() % 8;
    if (kind == 0) {
      grow(by_stage_, random_() % by_stage_.size(), count, far, free);
      return free;
    }
    std::vector<std::size_t> again;
    for (std::size_t j = 0; j < decisions_.size(); ++j)
      if (decisions_[j].distance > 0 && one(j)) again.push_back(j);
    if (kind == 1 || again.empty()) {
      grow(by_operation_, random_() % by_operation_.size(), count, far, free);
      return free;
    }
    const auto chosen = again[random_() % again.size()];
    const std::size_t others = 1 + random_() % 3;
    grow(by_operation_, group_of(chosen), count / (others + 1), far, free);
    for (std::size_t i = 0; i < others; ++i) {
      std::vector<std::size_t> there;
      for (auto j : by_stage_[random_() % (decisions_[chosen].stage + 1)])
        if (decisions_[j].distance == 0 && one(j) && !free[j]) there.push_back(j);
      if (!there.empty()) grow(by_operation_, group_of(there[random_() % there.size()]), count / (others + 1), far, free);
    }
    return free;
  }

  const problem& p_;
  incumbent& best_;
  monitor& m_;
  const improve_staged_options& options_;
  const B& backend_;
  std::mt19937_64 random_;
  /// Neighbourhoods are made of computations no farther than this from the block that they serve.
  static constexpr std::array<std::size_t, 4> distances_ = {4, 8, 16, std::numeric_limits<std::size_t>::max()};
  std::array<std::size_t, 4> columns_;  ///< to free, for each of the distances
  std::size_t binaries_ = 0;
  bool delay_ = false;  ///< `staged_order` delays
  bool exhausted_ = false;
  std::optional<staged_form> form_;
  Eigen::VectorXd x_;
  std::vector<staged_model::decision> decisions_;
  std::vector<std::size_t> group_;  ///< of each operation, in `by_operation_`
  std::vector<std::vector<std::size_t>> by_stage_, by_operation_;
};

}  // namespace detail

/// Makes a known order faster by solving parts of the MILP of the staged schedules in its order of first computations.
///
/// Each round frees some columns of `staged_form`: those of a window of stages, of neighbouring operations, or of an operation
/// that is computed again and of others whose values are held meanwhile; and of these mostly only the computations near the block
/// that they serve. The backend solves what is left with all other columns fixed, which takes a fraction of a second for some
/// thousand columns. The number of columns grows where that is solved, and shrinks where it takes too long. The model is that of
/// R2 and R3 with one more stage at the end (see `staging`) if the order is a solution of it, otherwise a less restricted one.
/// The order of the first computations never changes: `improve` changes it, and each gets out of local optima of the other.
///
/// Equal seeds give equal results where no limit cuts off the search or one of its rounds.
///
/// @tparam B      the MILP backend
/// @param p       the problem
/// @param best    the fastest known, which is improved; nothing is done if there is none or it is not staged in any order
/// @param m       seed, limits and stop; is told of each improvement
/// @param o       size of the neighbourhoods, and when to end
/// @param backend the backend
/// @param bound   a lower bound on the time of every schedule, s: reported, and the search ends when it is met
/// @throws bad_option for options out of range; what the backend throws
/// Complexity: O(stages (operations + edges)) and one MILP per round; the model takes 0.2 s for 170 operations, 4 s for 410.
///
/// Reference: Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998 (large
/// neighbourhoods); Jain et al., "Checkmate", MLSys 2020 (staged schedules).
/// @code
/// remat::improve_staged<remat::highs::backend>(p, best, m, {.window_seconds = 1});
/// @endcode
template <milp::backend B>
void improve_staged(const problem& p, incumbent& best, monitor& m, const improve_staged_options& o = {}, const B& backend = B(),
                    double bound = 0) {
  o.validate();
  const auto done = [&] { return m.stopped() || best.seconds() * (1 - m.limits().gap) <= bound; };
  if (!best.found() || done()) return;
  detail::staged_search<B> search(p, best, m, o, backend);
  if (!search.open()) return;
  for (std::size_t idle = 0; idle < o.patience && !search.exhausted() && !done(); ++idle) {
    if (!search.step()) continue;
    idle = 0;
    m.report({.stage = "staged neighbourhoods", .best = best.seconds(), .bound = bound});
  }
}

}  // namespace remat
