// SPDX-License-Identifier: Apache-2.0
/// @file
/// The strong alive-interval MILP of staged rematerialization schedules.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <remat/core/evaluate.hpp>
#include <remat/core/problem.hpp>
#include <remat/core/schedule.hpp>
#include <remat/milp/model.hpp>

namespace remat {

/// Which staged schedules a `staged_form` admits.
struct staging {
  /// R1: operations from `turn` on are computed once.
  bool backward_once = false;
  /// R2: the operations before `turn` form one stage.
  bool forward_in_one_stage = false;
  /// R3: a value is recomputed only in a stage that uses it (or in the last one, if it is a target); an operation that reads
  /// nothing repeatable but what the operation before it yields joins the stage before it.
  bool recompute_where_used = false;
  /// First operation of the backward; nothing: the one at which the store-all schedule has its peak. Only R1 and R2 read it.
  std::optional<index_t> turn = {};
  /// Empty stages before every stage but the first; they enlarge the class of schedules.
  unsigned extra_stages = 0;
  /// R4: the smallest values, which together take at most this share of the budget (less held bytes), stay from their computation
  /// until their last possible use; in [0, 1).
  double small_values = 0;
  /// The operations in the order of their first computation, a topological one; nothing: the order of the problem.
  std::optional<std::vector<index_t>> order = {};
};

/// The MILP whose solutions are the staged schedules of a problem within a budget.
///
/// The operations that targets depend on, in the order of the problem, are cut into blocks: single operations, unless R2 merges
/// the forward. Stage s first recomputes any operations of earlier blocks, ascending, each at most once, and then computes its
/// block. This restricts the order only; what is kept is free.
///
/// Columns, for stage s, operation i, value v:
/// - R[s,i] in {0,1}: stage s recomputes i (constant 1 for its block);
/// - S[s,v] in {0,1}: v is on the device when stage s starts;
/// - L[s,v,q] in [0,1], continuous: v is still there after the first q of its users u_1 < .. < u_r in stage s; constant 1 up to
/// the
///   last user in the block. L[s,v,r] stands for S[s+1,v], and L[s,v,0] for R[s,producer] + S[s,v] unless the producer has other
///   outputs, for whose sake alone it may be recomputed.
///
/// Rows:
/// - R[s,i] + S[s,v] <= 1 for each output v of i: recomputing what is held is never useful;
/// - L[s,v,0] <= R[s,producer] + S[s,v], R[s,u_q] <= L[s,v,q-1] and L[s,v,q] <= L[s,v,q-1];
/// - no waste: S[s,v] <= sum_q R[s,u_q] + S[s+1,v]; R[s,i] <= the same, summed over the outputs of i;
/// - memory at each step k: its outputs and workspace, if computed, and every L or S that holds there <= budget.
///
/// Where the block uses v, S[s,v] is 1 - R[s,producer] and no column. Columns that are constant in every solution are not made
/// either: R of an operation that nothing in this stage or later can need, S and L of a value that is not needed any more or
/// cannot be rebuilt while it is needed. Non-held sources are values that cannot be rebuilt; held ones only lower the budget.
/// Sizes are divided by their greatest common divisor, so rounding is exact.
///
/// References: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020 (stages, R,
/// S); the interval columns replace its indicator of freed values.
class staged_form {
 public:
  /// @param p      the problem; must outlive the form
  /// @param budget bytes, >= what `bounds_without_search` gives
  /// @param rules  the restrictions
  /// @param longest_row memory rows with more entries are split by a running sum
  /// @param stop   polled while the model is built, which takes long for thousands of operations; true leaves it incomplete
  /// @throws bad_option if `rules.turn` is no operation, `rules.small_values` out of range or `rules.order` no topological order
  /// Complexity: O(stages (operations + edges)) columns and rows; memory rows have O(values) entries each, unless split.
  staged_form(const problem& p, bytes_t budget, const staging& rules = {},
              std::size_t longest_row = std::numeric_limits<std::size_t>::max(), const std::function<bool()>& stop = {})
      : p_(p), rules_(rules), longest_row_(longest_row), needed_(needed_operations(p)) {
    if (rules_.turn && *rules_.turn > p.operations().size())
      throw bad_option("staging.turn must be an operation, got " + std::to_string(*rules_.turn));
    if (!(rules_.small_values >= 0 && rules_.small_values < 1))
      throw bad_option("staging.small_values must be in [0, 1), got " + std::to_string(rules_.small_values));
    if (rules_.order) take_order();
    index_values();
    hold_small_values(budget);
    cut_stages();
    scale(budget);
    make_columns();
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      if (stop && stop()) return;
      make_rows(s);
    }
    complete_ = true;
    model_ = builder_.build(base_seconds_ / second_);
  }

  /// False if `stop` ended the construction; `model` is empty then.
  bool complete() const { return complete_; }
  const milp::model& model() const { return model_; }
  /// Seconds per unit of the objective.
  double unit() const { return second_; }

  /// The schedule behind a solution: keeps what S says, recomputes what that asks for.
  /// Complexity: O(stages (operations + edges)).
  schedule extract(const Eigen::VectorXd& x) const {
    std::vector<index_t> order;
    for (std::size_t s = 0; s < stages_.size(); ++s) {
      const auto [first, last] = stages_[s];
      std::vector<bool> run(last, false);
      for (std::size_t i = last; i-- > 0;) {
        bool wanted = i >= first;
        for (auto v : at(i).outputs) {
          if (wanted) break;
          if (one(x, S(s, v))) continue;
          wanted = one(x, S(s + 1, v));
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
      if (first == last) continue;  // the next stage takes what an empty one could
      for (std::size_t next = 0; next < last; ++next, ++at) {
        if (at == order.size()) return std::nullopt;
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
      for (index_t v = 0; v < p_.values().size(); ++v)
        if (modelled_[v] && !stays_[v] && !set(x, S(stage, v), wanted[v])) return std::nullopt;
    }
    for (const auto& d : derived_) {
      x[d.column] = 0;
      for (const auto& part : d.parts) x[d.column] = std::max(x[d.column], value_of(x, part));
    }
    return x;
  }

 private:
  using expression = milp::expression;

  /// A continuous column that follows from others: the largest of its parts.
  struct derived {
    int column;
    std::vector<expression> parts;
  };

  const operation& at(std::size_t i) const { return p_.operations()[needed_[i]]; }
  const expression& S(std::size_t s, index_t v) const { return S_[s][v]; }
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

  void index_values() {
    producer_.assign(p_.values().size(), none);
    uses_.resize(p_.values().size());
    modelled_.assign(p_.values().size(), false);
    for (std::size_t i = 0; i < needed_.size(); ++i) {
      for (auto v : at(i).outputs) producer_[v] = static_cast<index_t>(i), modelled_[v] = true;
      for (auto v : at(i).inputs) uses_[v].push_back(i);
      base_seconds_ += at(i).seconds;
    }
    for (index_t v = 0; v < p_.values().size(); ++v)
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
    std::vector<index_t> order;
    for (auto o : *rules_.order) {
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
    std::vector<index_t> smallest;
    for (index_t v = 0; v < stays_.size(); ++v)
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
    index_t turn = 0;
    if (rules_.turn)
      turn = *rules_.turn;
    else if (rules_.backward_once || rules_.forward_in_one_stage)
      turn = peak_operation();
    const auto split = static_cast<std::size_t>(
        std::find_if(needed_.begin(), needed_.end(), [&](auto o) { return o >= turn; }) - needed_.begin());
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
  }

  /// Under R3, nothing is recomputed in the stage of an operation that reads nothing repeatable: it needs no stage of its own.
  bool joins(std::size_t i) const {
    const auto& inputs = at(i).inputs;
    return rules_.recompute_where_used && std::none_of(inputs.begin(), inputs.end(), [&](auto v) {
             return producer_[v] != none && producer_[v] + 1 != i && repeatable_[producer_[v]] && !stays_[v];
           });
  }

  /// The operation at which the store-all schedule of the needed operations has its peak.
  index_t peak_operation() const {
    const auto s = with_drops(p_, needed_);
    const auto e = evaluate(p_, s);
    const auto at = std::max_element(e.memory.begin(), e.memory.end()) - e.memory.begin();
    for (auto k = static_cast<std::size_t>(at); k < s.steps.size(); ++k)
      if (s.steps[k].what == action::compute) return s.steps[k].which;
    return 0;
  }

  void scale(bytes_t budget) {
    bytes_t divisor = 0;
    double largest = 0;
    for (std::size_t i = 0; i < needed_.size(); ++i) {
      divisor = std::gcd(divisor, at(i).workspace);
      for (auto v : at(i).outputs) divisor = std::gcd(divisor, p_.values()[v].bytes);
      for (auto v : at(i).inputs)
        if (modelled_[v]) divisor = std::gcd(divisor, p_.values()[v].bytes);
      largest = std::max(largest, at(i).seconds);
    }
    divisor = std::max<bytes_t>(divisor, 1);
    const double room = static_cast<double>((budget - always_there_) / divisor);
    const double unit = room > largest_room ? std::exp2(std::floor(std::log2(room / largest_room))) : 1;
    byte_ = static_cast<double>(divisor) * unit;
    room_ = room / unit;
    if (largest > 0) second_ = largest / 1000;
  }

  double size(index_t v) const { return static_cast<double>(p_.values()[v].bytes) / byte_; }

  void make_columns() {
    const auto n = needed_.size();
    const auto count = stages_.size();
    R_.assign(count, std::vector<expression>(n));
    S_.assign(count + 1, std::vector<expression>(p_.values().size()));
    std::vector<std::vector<bool>> useful(count + 1, std::vector<bool>(n, false));  // recomputing i in stage s serves something
    for (std::size_t s = 0; s < count; ++s)
      for (std::size_t i = stages_[s].first; i-- > 0;)
        for (auto v : at(i).outputs) {
          if (stays_[v]) continue;
          const bool serves = rules_.recompute_where_used
                                  ? used_in_block(s, v) || (p_.is_target(v) && s + 1 == count)
                                  : p_.is_target(v) || (!uses_[v].empty() && uses_[v].back() >= stages_[s].first);
          const auto is_useful = [&](std::size_t j) { return j < stages_[s].first && useful[s][j]; };
          if (repeatable_[i] && (serves || std::any_of(uses_[v].begin(), uses_[v].end(), is_useful))) useful[s][i] = true;
        }
    auto later = useful;  // .. in stage s or a later one
    for (std::size_t s = count; s-- > 0;)
      for (std::size_t i = 0; i < stages_[s].first; ++i) later[s][i] = later[s][i] || later[s + 1][i];

    for (std::size_t s = 0; s <= count; ++s) {
      const auto first = s < count ? stages_[s].first : n;
      if (s < count)
        for (std::size_t i = 0; i < stages_[s].second; ++i) {
          if (i >= first)
            R_[s][i].constant = 1;
          else if (useful[s][i])
            R_[s][i] = builder_.binary(at(i).seconds / second_);
        }
      for (index_t v = 0; v < p_.values().size(); ++v) {
        const auto i = producer_[v];
        if (!modelled_[v] || (i != none && i >= first)) continue;
        const auto& uses = uses_[v];
        const bool certain = p_.is_target(v) || (!uses.empty() && uses.back() >= first);
        const bool lasting = i == none || !repeatable_[i];
        if (s == count)
          S_[s][v].constant = p_.is_target(v);
        else if (certain && (lasting || stays_[v]))
          S_[s][v].constant = 1;
        else if (stays_[v])
          S_[s][v].constant = std::any_of(uses.begin(), uses.end(), [&](auto j) { return later[s][j]; });
        else if (used_in_block(s, v))
          S_[s][v] = expression{{}, 1} - R_[s][i];
        else if (certain || std::any_of(uses.begin(), uses.end(), [&](auto j) { return later[s][j]; }))
          S_[s][v] = builder_.binary(0);
      }
    }
  }

  bool used_in_block(std::size_t s, index_t v) const {
    const auto [first, last] = stages_[s];
    const auto user = std::lower_bound(uses_[v].begin(), uses_[v].end(), first);
    return user != uses_[v].end() && *user < last;
  }

  void at_most(const expression& left, const expression& right) {
    auto e = left - right;
    compact(e);
    double most = e.constant;  // all columns are in [0, 1]
    for (const auto& [column, factor] : e.terms) most += std::max(factor, 0.0);
    if (most > 1e-9) builder_.at_most(e, 0);
  }

  void make_rows(std::size_t s) {
    const auto [first, last] = stages_[s];
    const auto& R = R_[s];
    std::vector<expression> live(p_.values().size());                 // level of each value before the current step
    std::vector<std::vector<expression>> levels(p_.values().size());  // before each user of the stage, and after the last
    std::vector<std::vector<std::size_t>> users(p_.values().size());

    std::vector<expression> purpose(last);   // of recomputing each operation
    std::vector<bool> certain(last, false);  // is there one in any case?
    for (index_t v = 0; v < p_.values().size(); ++v) {
      const auto i = producer_[v];
      if (!modelled_[v] || (i != none && i >= last)) continue;
      for (auto j : uses_[v])
        if (j < last && !is_zero(R[j])) users[v].push_back(j);
      const auto& after = S(s + 1, v);
      const auto before = i == none || (stays_[v] && i < first) ? S(s, v) : R[i] + S(s, v);
      auto& level = levels[v];
      const auto others = [&](auto u) { return u != v && !stays_[u]; };
      const bool byproduct =  // may be recomputed without being used
          i != none && !constant(R[i]) && std::any_of(at(i).outputs.begin(), at(i).outputs.end(), others);
      if (!byproduct && !users[v].empty()) level.push_back(before);
      for (std::size_t q = level.size(); q < users[v].size(); ++q) {
        if (users[v].back() >= first || is_one(after) || stays_[v]) {
          level.push_back({{}, 1});
          continue;
        }
        derived_.push_back({builder_.columns(), {after}});
        for (std::size_t later = q; later < users[v].size(); ++later) derived_.back().parts.push_back(R[users[v][later]]);
        level.push_back(builder_.column(0, 0, 1));
      }
      level.push_back(after);
      at_most(level.front(), before);
      for (std::size_t q = 0; q < users[v].size(); ++q) {
        at_most(R[users[v][q]], level[q]);
        at_most(level[q + 1], level[q]);
      }

      live[v] = i == none ? before : S(s, v);
      if (stays_[v]) continue;
      if (i != none && !constant(R[i])) at_most(before, {{}, 1});
      const bool block_use = !users[v].empty() && users[v].back() >= first;
      expression use;
      for (auto j : users[v]) use.add(R[j]);
      if (!block_use && !is_one(after)) at_most(S(s, v), use + after);
      if (i != none) {
        const bool at_end = p_.is_target(v) && s + 1 == stages_.size();
        if (!rules_.recompute_where_used || at_end) use.add(after);
        purpose[i].add(use);
        certain[i] = certain[i] || block_use || at_end;
      }
    }
    for (std::size_t i = 0; i < last; ++i)
      if (!constant(R[i]) && !certain[i]) at_most(R[i], purpose[i]);
    make_memory_rows(s, live, levels);
  }

  /// @param live   level of each value when the stage starts
  /// @param levels of each value: before its first user, .., after its last
  void make_memory_rows(std::size_t s, std::vector<expression>& live, const std::vector<std::vector<expression>>& levels) {
    expression row;  // what is live before the current step
    std::vector<std::size_t> used(live.size(), 0);
    for (index_t v = 0; v < live.size(); ++v)
      if (modelled_[v] && !levels[v].empty()) row.add(live[v], size(v));
    const auto change = [&](index_t v, const expression& level) {
      row.add(live[v], -size(v)).add(level, size(v));
      live[v] = level;
    };
    for (std::size_t k = 0; k < stages_[s].second; ++k) {
      if (is_zero(R_[s][k])) continue;
      for (auto v : at(k).outputs) change(v, stays_[v] && k < stages_[s].first ? S(s, v) : R_[s][k] + S(s, v));
      compact(row);
      if (row.terms.size() > longest_row_) {
        derived_.push_back({builder_.columns(), {row}});
        auto sum = builder_.column(0, 0, milp::infinity);
        builder_.equal(row - sum, 0);
        row = std::move(sum);
      }
      builder_.at_most(row + static_cast<double>(at(k).workspace) / byte_ * R_[s][k], room_);
      for (auto v : at(k).outputs) change(v, levels[v].front());
      for (auto v : at(k).inputs)
        if (modelled_[v]) change(v, levels[v][++used[v]]);
    }
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

  static constexpr double largest_room = 1 << 20;  ///< rows keep one unit of memory well above the tolerances of a backend

  const problem& p_;
  staging rules_;
  std::size_t longest_row_;
  std::vector<index_t> needed_;                              ///< operations that targets depend on
  std::vector<bool> repeatable_;                             ///< per needed operation
  std::vector<std::pair<std::size_t, std::size_t>> stages_;  ///< needed operations [first, last) of each block
  std::vector<index_t> producer_;                            ///< of a value, among the needed operations
  std::vector<std::vector<std::size_t>> uses_;               ///< of a value, among the needed operations
  std::vector<bool> modelled_;                               ///< values that come and go
  std::vector<bool> stays_;                                  ///< values that are not dropped before their last possible use
  bytes_t always_there_ = 0;
  double base_seconds_ = 0, second_ = 1, byte_ = 1, room_ = 0;
  milp::builder builder_;
  std::vector<std::vector<expression>> R_, S_;  ///< per stage: 0/1 columns or constants
  std::vector<derived> derived_;
  milp::model model_;
  bool complete_ = false;
};

}  // namespace remat
