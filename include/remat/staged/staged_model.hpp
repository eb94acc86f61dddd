// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the MILPs of staged rematerialization schedules have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/model.hpp>
#include <remat/staged/staging.hpp>

namespace remat {

/// A MILP whose solutions are the staged schedules of a problem within a budget, without its columns and rows.
///
/// The operations that targets depend on, in the order of the problem, are cut into blocks: single operations, unless R2 or R3
/// merges some. Stage s first recomputes any operations of earlier blocks, ascending, each at most once, and then computes its
/// block. This restricts the order only; what is kept is free.
///
/// R[s,i] says that stage s computes operation i, S[s,v] that value v is on the device when stage s starts; both are 0/1 columns,
/// complements of such or constants. Non-held sources are values that cannot be rebuilt; held ones only lower the budget. Sizes
/// are divided by their greatest common divisor, so rounding is exact.
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
class staged_model {
 public:
  /// False if the construction was stopped; `model` is empty then.
  bool complete() const { return complete_; }
  const milp::model& model() const { return model_; }
  /// Seconds per unit of the objective.
  double unit() const { return second_; }

  /// Changes the budget: only bounds of rows change, so a model serves many budgets.
  /// @param budget bytes, not below the one that the model was built for
  /// Complexity: O(stages operations).
  void set_budget(bytes_t budget) {
    const double room = room_of(budget);
    for (auto row : memory_rows_) model_.row_upper[row] += room - room_;
    room_ = room;
  }

  /// The schedule behind a solution: keeps what S says, recomputes what that asks for.
  /// @param x    per column of `model`; of the LP relaxation, for instance
  /// @param kept values whose S is at least this are kept
  /// Complexity: O(stages (operations + edges)).
  schedule extract(const Eigen::VectorXd& x, double kept = 0.5) const {
    const auto is_kept = [&](const expression& e) { return value_of(x, e) >= kept; };
    std::vector<operation_id> order;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      const auto [first, last] = stages_[s];
      std::vector<bool> run(last, false);
      for (std::size_t i = last; i-- > 0;) {
        bool wanted = i >= first;
        for (auto v : at(i).outputs) {
          if (wanted) break;
          if (is_kept(S(s, v))) continue;
          wanted = is_kept(S(s + 1, v));
          for (auto j : uses_[v]) wanted = wanted || (j < last && run[j]);
        }
        run[i] = wanted;
      }
      for (std::size_t i = 0; i < last; ++i)
        if (run[i]) order.push_back(needed_[i]);
    }
    return with_drops(p_, order);
  }

  /// The solution behind a schedule, or nothing if the schedule is not staged in the sense of the rules.
  /// @param s a valid schedule without copies
  std::optional<Eigen::VectorXd> encode(const schedule& s) const {
    const auto order = compute_order(s);
    Eigen::VectorXd x = Eigen::VectorXd::Zero(model_.columns());
    std::vector<std::size_t> position(p_.operations().size(), needed_.size());
    for (std::size_t i = 0; i < needed_.size(); ++i) position[needed_[i]] = i;
    std::vector<std::size_t> starts;  // position in `order` of the first computation of each stage
    std::size_t at = 0;
    for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
      const auto [first, last] = stages_[stage];
      starts.push_back(at);
      const bool end = first == needed_.size();
      if (first == last && !end) continue;  // the next stage takes what an empty one could
      for (std::size_t next = 0; next < last; ++next, ++at) {
        if (at == order.size()) {
          if (end) break;
          return std::nullopt;
        }
        const auto i = position[order[at]];
        if (i < next || i >= last || !set(x, R_[stage][i], 1)) return std::nullopt;
        next = i;
      }
    }
    if (at != order.size()) return std::nullopt;
    starts.push_back(at);
    std::vector<bool> wanted(p_.values().size(), false);
    for (auto v : p_.targets()) wanted[v] = true;
    for (std::size_t stage = stages_.size(); stage-- > 0;) {
      for (at = starts[stage + 1]; at-- > starts[stage];) {
        for (auto v : p_.operations()[order[at]].outputs) wanted[v] = false;
        for (auto v : p_.operations()[order[at]].inputs) wanted[v] = true;
      }
      for (value_id v = 0; v < p_.values().size(); ++v)
        if (modelled_[v] && !stays_[v] && !set(x, S(stage, v), wanted[v])) return std::nullopt;
    }
    for (const auto& d : derived_) {
      x[d.column] = 0;
      for (const auto& part : d.parts) x[d.column] = std::max(x[d.column], value_of(x, part));
    }
    return x;
  }

 protected:
  using expression = milp::expression;

  staged_model(const problem& p, bytes_t budget, const staging& rules) : p_(p), rules_(rules), needed_(needed_operations(p)) {
    if (rules_.turn && *rules_.turn > p.operations().size())
      throw bad_option("staging.turn must be an operation, got " + std::to_string(*rules_.turn));
    if (!(rules_.small_values >= 0 && rules_.small_values < 1))
      throw bad_option("staging.small_values must be in [0, 1), got " + std::to_string(rules_.small_values));
    if (!rules_.order.empty()) take_order();
    index_values();
    hold_small_values(budget);
    cut_stages();
    scale(budget);
    R_.resize(stages_.size());
    S_.resize(stages_.size() + 1);
  }
  ~staged_model() = default;

  /// Makes the constants 0 of stage `s`, after the last one too.
  void open_stage(std::size_t s) {
    if (s < R_.size()) R_[s].resize(needed_.size());
    S_[s].resize(p_.values().size());
  }

  /// Ends the construction.
  void build() {
    model_ = builder_.build(base_seconds_ / second_);
    complete_ = true;
  }

  /// A continuous column that follows from others: the largest of its parts.
  struct derived {
    int column;
    std::vector<expression> parts;
  };

  const operation& at(std::size_t i) const { return p_.operations()[needed_[i]]; }
  const expression& S(std::size_t s, value_id v) const { return S_[s][v]; }
  static bool constant(const expression& e) { return e.terms.empty(); }
  static bool is_one(const expression& e) { return constant(e) && e.constant > 0.5; }
  static bool is_zero(const expression& e) { return constant(e) && e.constant < 0.5; }
  static double value_of(const Eigen::VectorXd& x, const expression& e) {
    double sum = e.constant;
    for (const auto& [column, factor] : e.terms) sum += factor * x[column];
    return sum;
  }
  static bool one(const Eigen::VectorXd& x, const expression& e) { return value_of(x, e) > 0.5; }
  /// Gives a 0/1 quantity its value; false if it is another quantity's complement, or a constant, of the other value.
  static bool set(Eigen::VectorXd& x, const expression& e, bool value) {
    if (!constant(e) && e.constant == 0) x[e.terms.front().first] = value;
    return one(x, e) == value;
  }

  double size(value_id v) const { return static_cast<double>(p_.values()[v].bytes) / byte_; }

  void at_most(const expression& left, const expression& right) {
    auto e = left - right;
    compact(e);
    if (builder_.most(e) > 1e-9) builder_.at_most(e, 0);
  }

  /// Adds the row `memory <= budget`, unless nothing exceeds that.
  void within_budget(const expression& memory) {
    if (builder_.most(memory) <= room_) return;
    memory_rows_.push_back(builder_.rows());
    builder_.at_most(memory, room_);
  }
  /// A column for the value of `sum`.
  expression running_sum(const expression& sum) {
    derived_.push_back({builder_.columns(), {sum}});
    auto column = builder_.column(0, 0, std::max(0.0, builder_.most(sum)));
    builder_.equal(sum - column, 0);
    return column;
  }

  /// Sums the terms of equal columns.
  static void compact(expression& e) {
    std::sort(e.terms.begin(), e.terms.end());
    std::size_t kept = 0;
    for (std::size_t t = 0; t < e.terms.size();) {
      auto [column, sum] = e.terms[t];
      for (++t; t < e.terms.size() && e.terms[t].first == column; ++t) sum += e.terms[t].second;
      if (sum != 0) e.terms[kept++] = {column, sum};
    }
    e.terms.resize(kept);
  }

  const problem& p_;
  staging rules_;
  std::vector<operation_id> needed_;                         ///< operations that targets depend on
  std::vector<bool> repeatable_;                             ///< per needed operation
  std::vector<std::pair<std::size_t, std::size_t>> stages_;  ///< needed operations [first, last) of each block
  std::vector<operation_id> producer_;                       ///< of a value, among the needed operations
  std::vector<std::vector<std::size_t>> uses_;               ///< of a value, among the needed operations
  std::vector<bool> modelled_;                               ///< values that come and go
  std::vector<bool> stays_;                                  ///< values that are not dropped before their last possible use
  double second_ = 1, byte_ = 1, room_ = 0;  ///< units of the objective and of the memory rows; budget in the latter
  milp::builder builder_;
  std::vector<std::vector<expression>> R_, S_;  ///< per stage
  std::vector<derived> derived_;                ///< in an order in which each follows from those before it

 private:
  void index_values() {
    producer_.assign(p_.values().size(), none);
    uses_.resize(p_.values().size());
    modelled_.assign(p_.values().size(), false);
    for (std::size_t i = 0; i < needed_.size(); ++i) {
      for (auto v : at(i).outputs) producer_[v] = static_cast<index_t>(i), modelled_[v] = true;
      for (auto v : at(i).inputs) uses_[v].push_back(i);
      base_seconds_ += at(i).seconds;
    }
    for (value_id v = 0; v < p_.values().size(); ++v)
      if (p_.is_source(v) && !p_.values()[v].held) {
        if (p_.is_target(v))
          always_there_ += p_.values()[v].bytes;
        else
          modelled_[v] = !uses_[v].empty();
      }
    always_there_ += p_.held_bytes();
  }

  /// Puts the needed operations into the order that `rules_` asks for.
  void take_order() {
    std::vector<bool> needed(p_.operations().size(), false), done(p_.operations().size(), false);
    for (auto o : needed_) needed[o] = true;
    std::vector<operation_id> order;
    for (auto o : rules_.order) {
      if (o >= needed.size() || done[o])
        throw bad_option("staging.order must be operations, each once, got " + std::to_string(o));
      for (auto v : p_.operations()[o].inputs)
        if (!p_.is_source(v) && !done[p_.producer(v)])
          throw bad_option("staging.order must be topological: operation " + std::to_string(o) + " reads what operation " +
                           std::to_string(p_.producer(v)) + " yields");
      done[o] = true;
      if (needed[o]) order.push_back(o);
    }
    if (order.size() != needed_.size()) throw bad_option("staging.order lacks operations that the targets depend on");
    needed_ = std::move(order);
  }

  /// Chooses the values that stay: those without bytes, for which that is no restriction, and those that R4 adds.
  void hold_small_values(bytes_t budget) {
    stays_.assign(p_.values().size(), false);
    std::vector<value_id> smallest;
    for (value_id v = 0; v < stays_.size(); ++v)
      if (modelled_[v]) smallest.push_back(v);
    std::stable_sort(smallest.begin(), smallest.end(),
                     [&](auto a, auto b) { return p_.values()[a].bytes < p_.values()[b].bytes; });
    auto room = static_cast<bytes_t>(rules_.small_values * static_cast<double>(budget - always_there_));
    for (auto v : smallest) {
      room -= p_.values()[v].bytes;
      if (room < 0) break;
      stays_[v] = true;
    }
  }

  void cut_stages() {
    operation_id turn = 0;
    if (rules_.turn)
      turn = *rules_.turn;
    else if (rules_.backward_once || rules_.forward_in_one_stage)
      turn = peak_operation();
    const auto split = static_cast<std::size_t>(std::find_if(needed_.begin(), needed_.end(), [&](auto o) { return o >= turn; }) -
                                                needed_.begin());
    for (std::size_t i = 0; i < needed_.size(); ++i) repeatable_.push_back(!at(i).once && !(rules_.backward_once && i >= split));
    for (std::size_t i = 0; i < needed_.size(); ++i) {
      if (!stages_.empty() && ((rules_.forward_in_one_stage && i < split) || joins(i))) {
        stages_.back().second = i + 1;
        continue;
      }
      if (!stages_.empty())
        for (unsigned e = 0; e < rules_.extra_stages; ++e) stages_.emplace_back(i, i);
      stages_.emplace_back(i, i + 1);
    }
    if (rules_.last_stage && !stages_.empty()) stages_.emplace_back(needed_.size(), needed_.size());
  }

  /// Under R3, nothing is recomputed in the stage of an operation that reads nothing repeatable: it needs no stage of its own.
  bool joins(std::size_t i) const {
    const auto& inputs = at(i).inputs;
    return rules_.recompute_where_used && std::none_of(inputs.begin(), inputs.end(), [&](auto v) {
             return producer_[v] != none && producer_[v] + 1 != i && repeatable_[producer_[v]] && !stays_[v];
           });
  }

  /// The operation at which the store-all schedule of the needed operations has its peak.
  operation_id peak_operation() const {
    const auto s = with_drops(p_, needed_);
    const auto e = evaluate(p_, s);
    const auto at = std::max_element(e.memory.begin(), e.memory.end()) - e.memory.begin();
    for (auto k = static_cast<std::size_t>(at); k < s.steps.size(); ++k)
      if (s.steps[k].what == action::compute) return s.steps[k].which;
    return 0;
  }

  void scale(bytes_t budget) {
    divisor_ = 0;
    double largest = 0;
    for (std::size_t i = 0; i < needed_.size(); ++i) {
      divisor_ = std::gcd(divisor_, at(i).workspace);
      for (auto v : at(i).outputs) divisor_ = std::gcd(divisor_, p_.values()[v].bytes);
      for (auto v : at(i).inputs)
        if (modelled_[v]) divisor_ = std::gcd(divisor_, p_.values()[v].bytes);
      largest = std::max(largest, at(i).seconds);
    }
    divisor_ = std::max<bytes_t>(divisor_, 1);
    room_ = room_of(budget);
    if (room_ > largest_room) unit_ = std::exp2(std::floor(std::log2(room_ / largest_room)));
    room_ /= unit_;
    byte_ = static_cast<double>(divisor_) * unit_;
    if (largest > 0) second_ = largest / 1000;
  }

  /// `budget` in units of the memory rows.
  double room_of(bytes_t budget) const { return static_cast<double>((budget - always_there_) / divisor_) / unit_; }

  static constexpr double largest_room = 1 << 20;  ///< rows keep one unit of memory well above the tolerances of a backend

  bytes_t always_there_ = 0, divisor_ = 1;
  double base_seconds_ = 0, unit_ = 1;
  std::vector<int> memory_rows_;
  milp::model model_;
  bool complete_ = false;
};

}  // namespace remat
