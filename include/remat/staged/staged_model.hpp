// SPDX-License-Identifier: Apache-2.0
/// @file
/// The common part of the MILPs of staged rematerialization schedules. Needs Eigen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <remat/core/liveness.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/model.hpp>
#include <remat/staged/stages.hpp>

namespace remat::staged {

/// A MILP whose solutions are the staged schedules of a problem within a budget. The derived forms `strong_form` and
/// `published_form` add the other columns and the rows.
///
/// R[s,i] = 1 if stage s computes operation i. S[s,v] = 1 if value v is on the device when stage s starts. Each of them is a 0/1
/// column, the complement of such columns, or a constant.
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
class staged_model {
 public:
  /// False if the construction was stopped; `model` is empty then.
  bool complete() const { return complete_; }
  const milp::model& model() const { return model_; }
  /// Seconds per unit of the objective.
  double unit() const { return stages_.seconds_per_unit; }

  /// Changes the budget. Only bounds of rows change, so one model serves many budgets.
  /// @param budget bytes, at least the budget of the construction
  /// Complexity: O(stages operations).
  void set_budget(bytes_t budget) {
    const double room = stages_.room(budget);
    for (auto row : memory_rows_) model_.row_upper[row] += room - room_;
    room_ = room;
  }

  /// The schedule behind a solution: keeps the values that S selects, and recomputes the operations that this requires.
  /// @param x    per column of `model`; may be a solution of the LP relaxation
  /// @param kept a value is kept where its S is at least this
  /// Complexity: O(stages (operations + edges)).
  schedule extract(const Eigen::VectorXd& x, double kept = 0.5) const {
    const auto is_kept = [&](const expression& e) { return e.at(x) >= kept; };
    std::vector<operation_id> order;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      const auto [first, last] = stages_.blocks[s];
      std::vector<bool> run(last, false);
      for (std::size_t i = last; i-- > 0;) {
        bool is_wanted = i >= first;
        for (auto v : stages_.at(i).outputs) {
          if (is_wanted) break;
          if (is_kept(S(s, v))) continue;
          is_wanted = is_kept(S(s + 1, v));
          for (auto j : stages_.uses[v]) is_wanted = is_wanted || (j < last && run[j]);
        }
        run[i] = is_wanted;
      }
      for (std::size_t i = 0; i < last; ++i)
        if (run[i]) order.push_back(stages_.needed[i]);
    }
    return with_drops(*stages_.p, order);
  }

  /// The solution behind a schedule.
  /// @param s a valid schedule without copies
  /// @return nothing if the schedule is not staged, or breaks a restriction
  std::optional<Eigen::VectorXd> encode(const schedule& s) const {
    const auto order = compute_order(s);
    Eigen::VectorXd x = Eigen::VectorXd::Zero(model_.columns());
    std::vector<std::size_t> position(stages_.p->operations().size(), stages_.needed.size());
    for (std::size_t i = 0; i < stages_.needed.size(); ++i) position[stages_.needed[i]] = i;
    std::vector<std::size_t> starts;  // position in `order` of the first computation of each stage
    std::size_t done = 0;
    for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
      const auto [first, last] = stages_.blocks[stage];
      starts.push_back(done);
      const bool end = first == stages_.needed.size();
      if (first == last && !end) continue;  // an empty stage stays empty: the next stage can run the same operations
      for (std::size_t next = 0; next < last; ++next, ++done) {
        if (done == order.size()) {
          if (end) break;
          return std::nullopt;
        }
        const auto i = position[order[done]];
        if (i < next || i >= last || !set(x, R_[stage][i], 1)) return std::nullopt;
        next = i;
      }
    }
    if (done != order.size()) return std::nullopt;
    starts.push_back(done);
    liveness after(*stages_.p);
    for (std::size_t stage = stages_.size(); stage-- > 0;) {
      for (done = starts[stage + 1]; done-- > starts[stage];) after.step_back(order[done]);
      for (value_id v = 0; v < stages_.p->values().size(); ++v)
        if (stages_.modelled[v] && !stages_.kept_throughout[v] && !set(x, S(stage, v), after.wanted(v))) return std::nullopt;
    }
    for (const auto& d : dependent_columns_) {
      x[d.column] = 0;
      for (const auto& part : d.parts) x[d.column] = std::max(x[d.column], part.at(x));
    }
    return x;
  }

 protected:
  using expression = milp::expression;

  /// @param s      the stages
  /// @param budget bytes
  staged_model(remat::staged::stages s, bytes_t budget) : stages_(std::move(s)), room_(stages_.room(budget)) {
    R_.assign(stages_.size(), std::vector<expression>(stages_.needed.size()));
    S_.assign(stages_.size() + 1, std::vector<expression>(stages_.p->values().size()));
  }
  ~staged_model() = default;

  const remat::staged::stages& frame() const { return stages_; }
  milp::builder& rows() { return builder_; }
  const expression& R(std::size_t s, std::size_t i) const { return R_[s][i]; }
  /// The constant 0 until it is set.
  expression& R(std::size_t s, std::size_t i) { return R_[s][i]; }
  expression& S(std::size_t s, value_id v) { return S_[s][v]; }

  /// Adds the row `memory <= budget`, unless the bounds of the columns imply it.
  void within_budget(const expression& memory) {
    if (builder_.upper_bound(memory) <= room_) return;
    memory_rows_.push_back(builder_.rows());
    builder_.at_most(memory, room_);
  }
  /// Notes for `encode` that the next column to be made equals the largest of `parts`.
  void next_is_largest_of(std::vector<expression> parts) { dependent_columns_.push_back({builder_.columns(), std::move(parts)}); }
  /// Makes a column that equals `sum`.
  expression running_sum(const expression& sum) {
    next_is_largest_of({sum});
    return builder_.running_sum(sum);
  }
  /// Builds the model and ends the construction.
  void build() {
    model_ = builder_.build(stages_.base_seconds / stages_.seconds_per_unit);
    complete_ = true;
  }

 private:
  struct dependent_column {
    int column;
    std::vector<expression> parts;
  };

  const expression& S(std::size_t s, value_id v) const { return S_[s][v]; }
  /// Gives a 0/1 quantity its value in `x`.
  /// @return false if the quantity is a constant, or the complement of other columns, with the other value
  static bool set(Eigen::VectorXd& x, const expression& e, bool value) {
    if (!e.is_constant() && e.constant == 0) x[e.terms.front().first] = value;
    return (e.at(x) > 0.5) == value;
  }

  remat::staged::stages stages_;
  double room_;  // the budget in units of the memory rows
  milp::builder builder_;
  std::vector<std::vector<expression>> R_, S_;       // per stage
  std::vector<dependent_column> dependent_columns_;  // each follows from the columns before it
  std::vector<int> memory_rows_;
  milp::model model_;
  bool complete_ = false;
};

}  // namespace remat::staged
