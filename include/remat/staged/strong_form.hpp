// SPDX-License-Identifier: Apache-2.0
/// @file
/// The strong alive-interval MILP of staged rematerialization schedules. Needs Eigen.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include <remat/core/problem.hpp>
#include <remat/milp/model.hpp>
#include <remat/staged/staged_model.hpp>

namespace remat::staged {

/// The MILP whose solutions are the staged schedules of a problem within a budget.
///
/// Columns, for stage s, operation i, value v, besides R[s,i] and S[s,v] of `staged_model`:
/// - L[s,v,q] in [0,1], continuous: v is still there after the first q of its users u_1 < .. < u_r in stage s. It is 1 up to the
///   last user in the block. L[s,v,r] stands for S[s+1,v]. L[s,v,0] stands for R[s,producer] + S[s,v], unless the producer has
///   other outputs and may be recomputed for their sake alone.
///
/// Rows:
/// - R[s,i] + S[s,v] <= 1 for each output v of i: recomputing a value that is on the device is never useful;
/// - L[s,v,0] <= R[s,producer] + S[s,v], R[s,u_q] <= L[s,v,q-1] and L[s,v,q] <= L[s,v,q-1];
/// - no waste: S[s,v] <= sum_q R[s,u_q] + S[s+1,v]; R[s,i] <= the same, summed over the outputs of i;
/// - memory at each step k: its outputs and workspace, if computed, and each L or S that holds at k <= budget.
///
/// If the block reads v, S[s,v] is 1 - R[s,producer] and not a column. Quantities that are constant in every solution are no
/// columns, either: R of an operation that nothing in this stage or later can need; S and L of a value that is not needed any
/// more, that cannot be recomputed while it is needed, or that stays anyway (R4; values without bytes).
///
/// With copies there are more columns for each value v that may move, in POET's terms:
/// - M_in[s,v] in {0,1}: v comes back when stage s begins. R[s,producer] + S[s,v] + M_in[s,v] takes the place of R + S in the
///   rows above, and is <= 1;
/// - out[s,v] and in[s,v] in [0,1]: the parts of the copies of v to the host and to the device that lie in stage s;
/// - W[s] >= 0: the seconds of stage s beyond its block. The objective is the sum of W instead of that of R.
///
/// There are more rows, too. O, I and M are the sums of out, in and M_in up to stage s:
/// - a value in a copy is there: out <= R[s,producer] + S[s,v] + M_in[s,v]; in <= S[s,v] + M_in[s,v]; M_in[s,v] <= O[s-1,v] <= 1;
/// - a copy to the device ends before its value is read or dropped: 0 <= M - I <= S[s+1,v]; M - I <= 1 - R[s,u] for each user u
///   that is recomputed; M - I <= 0 if the block reads v, or if v is a target and s the last stage;
/// - W[s] + seconds of the block >= seconds of the parts of copies, in each direction;
/// - W[s] >= seconds of R + w. If the block is one operation, w = seconds of the parts of copies of its outputs to the host, and
///   W[s] >= seconds of the parts of copies of its inputs to the device + w. Otherwise w = 0.
///
/// Take a staged schedule with three properties. Copies to the device come first in their stage. Between two computations of a
/// stage, only values that the first of them reads or makes are dropped. Sources that are targets stay. Let a stage last until
/// the first copy or computation of the next stage begins. Then the schedule satisfies the rows, with W as `evaluate` counts. So
/// the optimum is a lower bound on the time of these schedules. It may be below the fastest of them: copies in parts can do more
/// than whole copies.
///
/// Reference: Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020 (stages, R,
/// S); the interval columns replace its indicator of freed values. Patil et al., "POET: Training Neural Networks on Tiny Devices
/// with Integrated Rematerialization and Paging", ICML 2022 (M_in; M_out and S_sd are out and O; its paging takes no time).
class strong_form : public staged_model {
 public:
  static constexpr bool restricts = true;  ///< takes all members of `staging`

  /// @param p      the problem; must outlive the form
  /// @param budget bytes, >= the budget of `bounds_without_search`
  /// @param rules  the restrictions and extensions
  /// @param longest_row memory rows with more entries are split by a running sum
  /// @param stop   polled while the model is built, which takes long for thousands of operations; true leaves it incomplete
  /// @param copies true: values may be copied to the host and back
  /// @throws bad_option as `stages` does, or if `copies` is true and the problem allows no copies
  /// Complexity: O(stages (operations + edges)) columns and rows; memory rows have O(values) entries each, unless split.
  strong_form(const problem& p, bytes_t budget, const staging& rules = {},
              std::size_t longest_row = std::numeric_limits<std::size_t>::max(), const std::function<bool()>& stop = {},
              bool copies = false)
      : staged_model(stages(p, budget, rules), budget), longest_row_(longest_row), copies_(copies) {
    if (copies && !p.copies()) throw bad_option("strong_form.copies: the problem allows no copies");
    if (copies) {
      const std::vector<expression> zeros(p.values().size());
      M_in_.assign(frame().size() + 1, zeros);
      unfinished_prefetches_ = sent_to_host_ = zeros;
    }
    if (!make_columns(stop)) return;
    for (std::size_t s = 0; s < frame().size(); ++s) {
      if (stop && stop()) return;
      make_rows(s);
    }
    if (copies)
      for (value_id v = 0; v < p.values().size(); ++v)
        if (is_movable(v)) rows().at_most(sent_to_host_[v], {{}, 1});
    build();
  }

  /// The schedule behind a solution with copies, without the copies themselves. The caller lays copies over it.
  /// @param x per column of `model`
  /// @return the order of computations; and per value: is it brought back?
  /// Complexity: O(stages (operations + values)).
  std::pair<std::vector<operation_id>, std::vector<bool>> extract_copied(const Eigen::VectorXd& x) const {
    std::pair<std::vector<operation_id>, std::vector<bool>> answer;
    answer.second.assign(frame().p->values().size(), false);
    for (std::size_t s = 0; s < frame().size(); ++s) {
      for (std::size_t i = 0; i < frame().blocks[s].second; ++i)
        if (R(s, i).at(x) >= 0.5) answer.first.push_back(frame().needed[i]);
      for (value_id v = 0; v < answer.second.size(); ++v)
        if (M_in_[s][v].at(x) >= 0.5) answer.second[v] = true;
    }
    return answer;
  }

 private:
  using staged_model::R;
  /// May `v` be copied?
  bool is_movable(value_id v) const {
    const auto& x = frame().p->values()[v];
    return copies_ && frame().modelled[v] && !frame().kept_throughout[v] && x.movable && x.bytes > 0;
  }
  /// Is `v` on the device after the copies at the beginning of stage `s`, before any computation?
  expression after_prefetches(std::size_t s, value_id v) { return is_movable(v) ? S(s, v) + M_in_[s][v] : S(s, v); }

  /// @return false if `stop` ended it
  bool make_columns(const std::function<bool()>& stop) {
    const auto n = frame().needed.size();
    const auto count = frame().size();
    std::vector<std::vector<bool>> useful(count + 1, std::vector<bool>(n, false));  // may recomputing i in stage s help?
    for (std::size_t s = 0; s < count; ++s)
      for (std::size_t i = frame().blocks[s].first; i-- > 0;)
        for (auto v : frame().at(i).outputs) {
          if (frame().kept_throughout[v]) continue;
          const bool is_used =
              frame().rules.recompute_where_used
                  ? frame().used_in_block(s, v) || (frame().p->is_target(v) && s + 1 == count)
                  : frame().p->is_target(v) || (!frame().uses[v].empty() && frame().uses[v].back() >= frame().blocks[s].first);
          const auto is_useful = [&](std::size_t j) { return j < frame().blocks[s].first && useful[s][j]; };
          if (frame().repeatable[i] && (is_used || std::any_of(frame().uses[v].begin(), frame().uses[v].end(), is_useful)))
            useful[s][i] = true;
        }
    auto useful_from_now = useful;  // the same for stage s or a later one
    for (std::size_t s = count; s-- > 0;)
      for (std::size_t i = 0; i < frame().blocks[s].first; ++i)
        useful_from_now[s][i] = useful_from_now[s][i] || useful_from_now[s + 1][i];

    for (std::size_t s = 0; s <= count; ++s) {
      if (stop && stop()) return false;
      const auto first = s < count ? frame().blocks[s].first : n;
      if (s < count)
        for (std::size_t i = 0; i < frame().blocks[s].second; ++i) {
          if (i >= first)
            R(s, i).constant = 1;
          else if (useful[s][i])
            R(s, i) = rows().binary(copies_ ? 0 : frame().at(i).seconds / frame().seconds_per_unit);
        }
      for (value_id v = 0; v < frame().p->values().size(); ++v) {
        const auto i = frame().producer[v];
        if (!frame().modelled[v] || (i != stages::no_position && i >= first)) continue;
        const auto& uses = frame().uses[v];
        const bool is_certain = frame().p->is_target(v) || (!uses.empty() && uses.back() >= first);
        const bool cannot_be_recomputed = i == stages::no_position || !frame().repeatable[i];
        if (s == count)
          S(s, v).constant = frame().p->is_target(v);
        else if (is_certain && ((cannot_be_recomputed && !is_movable(v)) || frame().kept_throughout[v] || s == 0))
          S(s, v).constant = 1;
        else if (frame().kept_throughout[v])
          S(s, v).constant = std::any_of(uses.begin(), uses.end(), [&](auto j) { return useful_from_now[s][j]; });
        else if (frame().used_in_block(s, v) || is_certain ||
                 std::any_of(uses.begin(), uses.end(), [&](auto j) { return useful_from_now[s][j]; })) {
          if (is_movable(v) && s > 0) M_in_[s][v] = rows().binary(0);
          if (!frame().used_in_block(s, v))
            S(s, v) = rows().binary(0);
          else
            S(s, v) = expression{{}, 1} - (is_movable(v) ? M_in_[s][v] : expression()) -
                      (i == stages::no_position ? expression() : R(s, i));
        }
      }
    }
    return true;
  }

  void make_rows(std::size_t s) {
    const auto [first, last] = frame().blocks[s];
    const auto run = [&](std::size_t i) -> const expression& { return R(s, i); };
    std::vector<expression> live(frame().p->values().size());  // per value: part that is live before the current step
    std::vector<std::vector<expression>> levels(frame().p->values().size());  // per value: L before each user, after the last
    std::vector<std::vector<std::size_t>> users(frame().p->values().size());

    std::vector<expression> purpose(last);      // per operation: uses of its outputs that justify recomputing it
    std::vector<bool> is_certain(last, false);  // per operation: is there such a use in any case?
    for (value_id v = 0; v < frame().p->values().size(); ++v) {
      const auto i = frame().producer[v];
      if (!frame().modelled[v] || (i != stages::no_position && i >= last)) continue;
      for (auto j : frame().uses[v])
        if (j < last && !run(j).is_zero()) users[v].push_back(j);
      const auto& after = S(s + 1, v);
      const auto before = i == stages::no_position || (frame().kept_throughout[v] && i < first) ? after_prefetches(s, v)
                                                                                                : run(i) + after_prefetches(s, v);
      auto& level = levels[v];
      const auto is_other_output = [&](auto u) { return u != v && !frame().kept_throughout[u]; };
      const bool is_byproduct =  // may be recomputed for another output, without being used
          i != stages::no_position && !run(i).is_constant() &&
          std::any_of(frame().at(i).outputs.begin(), frame().at(i).outputs.end(), is_other_output);
      if (!is_byproduct && !users[v].empty()) level.push_back(before);
      for (std::size_t q = level.size(); q < users[v].size(); ++q) {
        if (users[v].back() >= first || after.is_one() || frame().kept_throughout[v]) {
          level.push_back({{}, 1});
          continue;
        }
        std::vector<expression> parts = {after};
        for (std::size_t k = q; k < users[v].size(); ++k) parts.push_back(run(users[v][k]));
        next_is_largest_of(std::move(parts));
        level.push_back(rows().column(0, 0, 1));
      }
      level.push_back(after);
      rows().at_most(level.front(), before);
      for (std::size_t q = 0; q < users[v].size(); ++q) {
        rows().at_most(run(users[v][q]), level[q]);
        rows().at_most(level[q + 1], level[q]);
      }

      live[v] = i == stages::no_position ? before : after_prefetches(s, v);
      if (frame().kept_throughout[v]) continue;
      if (is_movable(v) || (i != stages::no_position && !run(i).is_constant())) rows().at_most(before, {{}, 1});
      const bool block_use = !users[v].empty() && users[v].back() >= first;
      expression use;
      for (auto j : users[v]) use.add(run(j));
      if (!block_use && !after.is_one() && !is_movable(v)) rows().at_most(S(s, v), use + after);
      if (i != stages::no_position) {
        const bool at_end = frame().p->is_target(v) && s + 1 == frame().size();
        if (!frame().rules.recompute_where_used || at_end) use.add(after);
        purpose[i].add(use);
        is_certain[i] = is_certain[i] || block_use || at_end || is_movable(v);
      }
    }
    for (std::size_t i = 0; i < last; ++i)
      if (!run(i).is_constant() && !is_certain[i]) rows().at_most(run(i), purpose[i]);
    make_memory_rows(s, live, levels);
    if (copies_) make_copy_rows(s);
  }

  /// The copies in stage `s`, and the seconds of the stage.
  void make_copy_rows(std::size_t s) {
    const auto [first, last] = frame().blocks[s];
    const auto& rates = *frame().p->copies();
    expression recompute_seconds, to_host_seconds, to_device_seconds, awaited_seconds, own_seconds;
    double block_seconds = 0;
    for (std::size_t i = 0; i < last; ++i) {
      const double seconds = milp::in_units(frame().at(i).seconds, frame().seconds_per_unit);
      i < first ? void(recompute_seconds.add(R(s, i), seconds)) : void(block_seconds += seconds);
    }
    const bool single = last == first + 1;
    for (value_id v = 0; v < frame().p->values().size(); ++v) {
      const auto i = frame().producer[v];
      if (!is_movable(v) || (i != stages::no_position && i >= last)) continue;
      const auto copy_seconds = [&](double rate) {
        return milp::in_units(rates.latency + static_cast<double>(frame().p->values()[v].bytes) / rate, frame().seconds_per_unit);
      };
      const auto present = after_prefetches(s, v), present_or_made = i == stages::no_position ? present : R(s, i) + present;
      rows().at_most(M_in_[s][v], sent_to_host_[v]);
      if (!present_or_made.is_zero()) {
        const auto part = rows().column(0, 0, 1);
        rows().at_most(part, present_or_made);
        sent_to_host_[v].add(part);
        to_host_seconds.add(part, copy_seconds(rates.to_host));
        if (single && i == first) own_seconds.add(part, copy_seconds(rates.to_host));
      }
      unfinished_prefetches_[v].add(M_in_[s][v]);
      if (!unfinished_prefetches_[v].is_constant() && !present.is_zero()) {
        const auto part = rows().column(0, 0, 1);
        rows().at_most(part, present);
        unfinished_prefetches_[v].add(part, -1);
        to_device_seconds.add(part, copy_seconds(rates.to_device));
        if (single && frame().used_in_block(s, v)) awaited_seconds.add(part, copy_seconds(rates.to_device));
      }
      if (unfinished_prefetches_[v].is_constant()) continue;
      rows().at_least(unfinished_prefetches_[v], 0);
      const bool needed_at_end = frame().p->is_target(v) && s + 1 == frame().size();
      rows().at_most(unfinished_prefetches_[v], frame().used_in_block(s, v) || needed_at_end ? expression() : S(s + 1, v));
      for (auto u : frame().uses[v])
        if (u < first && !R(s, u).is_zero()) rows().at_most(unfinished_prefetches_[v], expression{{}, 1} - R(s, u));
    }
    const auto seconds_beyond_block = rows().column(1, 0, milp::infinity);
    rows().at_most(recompute_seconds + own_seconds, seconds_beyond_block);
    rows().at_most(to_host_seconds, seconds_beyond_block + expression{{}, block_seconds});
    rows().at_most(to_device_seconds, seconds_beyond_block + expression{{}, block_seconds});
    rows().at_most(awaited_seconds + own_seconds, seconds_beyond_block);
  }

  /// @param live   per value: the part that is live when the stage starts
  /// @param levels per value: L before its first user, .., after its last user
  void make_memory_rows(std::size_t s, std::vector<expression>& live, const std::vector<std::vector<expression>>& levels) {
    expression row;  // bytes that are live before the current step
    std::vector<std::size_t> used(live.size(), 0);
    for (value_id v = 0; v < live.size(); ++v)
      if (frame().modelled[v] && !levels[v].empty()) row.add(live[v], frame().size(v));
    const auto change = [&](value_id v, const expression& level) {
      row.add(live[v], -frame().size(v)).add(level, frame().size(v));
      live[v] = level;
    };
    for (std::size_t k = 0; k < frame().blocks[s].second; ++k) {
      if (R(s, k).is_zero()) continue;
      for (auto v : frame().at(k).outputs)
        change(v, frame().kept_throughout[v] && S(s, v).is_one() ? S(s, v) : R(s, k) + after_prefetches(s, v));
      row.compact();
      if (row.terms.size() > longest_row_) row = running_sum(row);
      within_budget(row + static_cast<double>(frame().at(k).workspace) / frame().bytes_per_unit * R(s, k));
      for (auto v : frame().at(k).outputs) change(v, levels[v].front());
      for (auto v : frame().at(k).inputs)
        if (frame().modelled[v]) change(v, levels[v][++used[v]]);
    }
  }

  std::size_t longest_row_;
  bool copies_;
  std::vector<std::vector<expression>> M_in_;                     // per stage
  std::vector<expression> unfinished_prefetches_, sent_to_host_;  // per value, sums up to the current stage: M - I, O
};

}  // namespace remat::staged
